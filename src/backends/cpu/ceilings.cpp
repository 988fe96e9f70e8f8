#include "deep_ep/ceilings.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#include "backends/cpu/rows.hpp"
#include "backends/cpu/workers.hpp"
#include "base/check.hpp"

namespace deep_ep {

namespace {

using cpu::StoreMode;

constexpr std::int64_t kGrain = 16;

double median_seconds(int num_iters, const std::function<void()>& work) {
  work();  // touches the memory
  std::vector<double> seconds;
  for (int i = 0; i < num_iters; ++i) {
    const auto start = std::chrono::steady_clock::now();
    work();
    seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::ranges::sort(seconds);
  return seconds[seconds.size() / 2];
}

std::vector<std::int64_t> scattered(std::int64_t count) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(1));
  return order;
}

void require_positive(std::initializer_list<int> values) {
  require(std::ranges::all_of(values, [](int value) { return value > 0; }),
          "sizes, threads and iterations must be positive");
}

}  // namespace

double copy_rows_seconds(int num_rows, int row_bytes, int num_threads, int num_iters) {
  require_positive({num_rows, row_bytes, num_threads, num_iters});
  const auto bytes = static_cast<std::size_t>(row_bytes);
  const std::size_t total = static_cast<std::size_t>(num_rows) * bytes;
  std::vector<std::byte> source(total, std::byte{1}), target(total);
  const std::vector<std::int64_t> order = scattered(num_rows);
  cpu::Workers workers(num_threads);
  const auto copy_all = [&](StoreMode mode) {
    workers.parallel_for(num_rows, kGrain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        const auto from = static_cast<std::size_t>(order[static_cast<std::size_t>(row)]) * bytes;
        cpu::copy_row(&target[static_cast<std::size_t>(row) * bytes], &source[from], bytes, mode);
      }
      cpu::finish_streaming();
    });
  };
  return std::min(median_seconds(num_iters, [&] { copy_all(StoreMode::kStreaming); }),
                  median_seconds(num_iters, [&] { copy_all(StoreMode::kCached); }));
}

double sum_rows_seconds(int num_outputs, int num_terms, int hidden, int num_threads,
                        int num_iters) {
  require_positive({num_outputs, num_terms, hidden, num_threads, num_iters});
  require(num_terms <= 32, "num_terms must be at most 32, got ", num_terms);
  const auto width = static_cast<std::size_t>(hidden);
  const auto terms = static_cast<std::size_t>(num_terms);
  const std::int64_t num_rows = std::int64_t{num_outputs} * num_terms;
  std::vector<std::uint16_t> source(static_cast<std::size_t>(num_rows) * width, 0x3f80);  // 1.0
  std::vector<std::uint16_t> target(static_cast<std::size_t>(num_outputs) * width);
  const std::vector<std::int64_t> order = scattered(num_rows);
  const std::vector<std::uint8_t> ones(terms, 1);
  cpu::Workers workers(num_threads);
  return median_seconds(num_iters, [&] {
    workers.parallel_for(num_outputs, kGrain, [&](std::int64_t begin, std::int64_t end) {
      std::array<const std::uint16_t*, 32> rows{};
      for (std::int64_t out = begin; out < end; ++out) {
        for (std::size_t k = 0; k < terms; ++k) {
          const std::int64_t row = order[static_cast<std::size_t>(out) * terms + k];
          rows[k] = &source[static_cast<std::size_t>(row) * width];
        }
        cpu::sum_rows(&target[static_cast<std::size_t>(out) * width],
                      {.rows = {rows.data(), terms}, .group_sizes = ones}, width,
                      StoreMode::kStreaming);
      }
      cpu::finish_streaming();
    });
  });
}

}  // namespace deep_ep
