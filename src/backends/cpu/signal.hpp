#pragma once
// Words in shared memory that only grow, and bounded waits for them.
#include <chrono>
#include <cstdint>
#include <functional>

namespace deep_ep::cpu {

using Clock = std::chrono::steady_clock;

/// A word with one writer. Zero-filled memory is a valid signal at 0.
struct alignas(64) Signal {
  std::uint64_t value = 0;
  std::uint32_t num_sleepers =
      0;  ///< waiters that need to be woken; a dead one only costs a system call
};

/// Raises the signal: what this thread wrote before is visible to whoever sees `value` or more.
void post(Signal& signal, std::uint64_t value);

/// The value; acquires what its writer released with it.
std::uint64_t peek(const Signal& signal) noexcept;

/// How eagerly to wait: spinning costs others their core when ranks share cores.
struct WaitPolicy {
  int num_spins = 100;
  std::chrono::nanoseconds yield_for = std::chrono::microseconds(200);
};
WaitPolicy wait_policy_for(int num_ranks_on_host, int num_cores) noexcept;

/// Waits until the signal is at least `target`; true if so. Ends early when `deadline` has passed
/// or `should_stop()` (asked every few milliseconds) says so.
bool wait_at_least(Signal& signal, std::uint64_t target, const WaitPolicy& policy,
                   Clock::time_point deadline, const std::function<bool()>& should_stop);

}  // namespace deep_ep::cpu
