#pragma once
// Runs a function on several threads, with the index of each, and waits for all.
#include <thread>
#include <vector>

namespace deep_ep::testing {

template <typename Body>
void run_threads(int num_threads, const Body& body) {
  std::vector<std::jthread> threads;
  for (int i = 0; i < num_threads; ++i) threads.emplace_back([&body, i] { body(i); });
}

}  // namespace deep_ep::testing
