#include "backends/cpu/signal.hpp"

#include <sched.h>

#include <atomic>

#include "os/futex.hpp"

namespace deep_ep::cpu {

namespace {

// A dead peer is noticed after at most this long.
constexpr std::chrono::nanoseconds kNap = std::chrono::milliseconds(20);

// The low half of the value is what the kernel compares; x86-64 and AArch64 are little-endian.
std::uint32_t* futex_word(Signal& signal) {
  return reinterpret_cast<std::uint32_t*>(&signal.value);
}

void pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void post(Signal& signal, std::uint64_t value) {
  // Both sides store, then look at the other's word, all sequentially consistent: either the waiter
  // sees the new value, or this thread sees the waiter. The store is also the release of the
  // payload.
  std::atomic_ref(signal.value).store(value, std::memory_order_seq_cst);
  if (std::atomic_ref(signal.num_sleepers).load(std::memory_order_seq_cst) != 0) {
    futex_wake_all(futex_word(signal));
  }
}

std::uint64_t peek(const Signal& signal) noexcept {
  return std::atomic_ref(const_cast<Signal&>(signal).value).load(std::memory_order_acquire);
}

WaitPolicy wait_policy_for(int num_ranks_on_host, int num_cores) noexcept {
  if (num_ranks_on_host > num_cores) {
    return {.num_spins = 0};
  }
  return {};
}

bool wait_at_least(Signal& signal, std::uint64_t target, const WaitPolicy& policy,
                   Clock::time_point deadline, const std::function<bool()>& should_stop) {
  if (peek(signal) >= target) return true;
  for (int i = 0; i < policy.num_spins; ++i) {
    if (peek(signal) >= target) return true;
    pause();
  }
  const auto yield_until = Clock::now() + policy.yield_for;
  while (Clock::now() < yield_until) {
    if (peek(signal) >= target) return true;
    sched_yield();
  }
  while (true) {
    std::atomic_ref sleepers(signal.num_sleepers);
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    const std::uint64_t seen = std::atomic_ref(signal.value).load(std::memory_order_seq_cst);
    if (seen < target)
      futex_wait(futex_word(signal), static_cast<std::uint32_t>(seen), kNap.count());
    sleepers.fetch_sub(1, std::memory_order_relaxed);
    if (peek(signal) >= target) return true;
    // What a peer posted before it left counts: look at the signal once more after the question.
    if (should_stop() || Clock::now() >= deadline) return peek(signal) >= target;
  }
}

}  // namespace deep_ep::cpu
