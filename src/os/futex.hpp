#pragma once
// Sleep until a word in shared memory changes. Works between processes and between threads.
#include <cstdint>

namespace deep_ep {

/// Why futex_wait returned. None of them says what the word holds now: look again.
enum class FutexResult {
  kWoken,    ///< somebody called futex_wake_all, or a signal came
  kChanged,  ///< the word was not `expected` to begin with
  kTimeout,  ///< `timeout_ns` have passed
};

/// Sleeps while `*word == expected`, at most `timeout_ns`. The waker must change the word before it
/// calls futex_wake_all. Orders no memory: read the word with acquire after it. Throws kSystem.
FutexResult futex_wait(const std::uint32_t* word, std::uint32_t expected, std::int64_t timeout_ns);

/// Wakes every thread of every process that sleeps on this word of shared memory. Throws kSystem.
void futex_wake_all(std::uint32_t* word);

}  // namespace deep_ep
