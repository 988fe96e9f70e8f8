#pragma once
// A point in time that bounds several waits together, with the limit it came from for messages.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <string>

#include "base/check.hpp"

namespace deep_ep {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  /// `timeout` from now; a negative one has passed already, one too long for the clock never does.
  explicit Deadline(std::chrono::nanoseconds timeout)
      : timeout_(std::max(timeout, std::chrono::nanoseconds::zero())) {
    const Clock::time_point now = Clock::now();
    at_ = timeout_ > Clock::time_point::max() - now ? Clock::time_point::max() : now + timeout_;
  }

  Clock::time_point at() const noexcept { return at_; }
  bool has_passed() const noexcept { return Clock::now() >= at_; }

  /// What is left, never negative.
  std::chrono::nanoseconds remaining() const noexcept {
    return std::max<std::chrono::nanoseconds>(at_ - Clock::now(), std::chrono::nanoseconds::zero());
  }

  /// What is left in the milliseconds of poll(). Rounded up, so that a wait does not end early and
  /// spin; capped, so a caller that gets a timeout from poll() asks has_passed().
  int remaining_poll_ms() const noexcept {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(remaining()).count();
    return static_cast<int>(std::min<std::int64_t>(left, std::numeric_limits<int>::max()));
  }

  /// The limit as a message gives it: "2.5 s".
  std::string limit_text() const {
    return concat(std::chrono::duration<double>(timeout_).count(), " s");
  }

  /// This one put off by `extra`, for who waits for another's report about the same limit.
  Deadline later_by(std::chrono::nanoseconds extra) const {
    Deadline later = *this;
    later.at_ = extra > Clock::time_point::max() - at_ ? Clock::time_point::max() : at_ + extra;
    return later;
  }

  /// The earlier of this and `timeout` from now.
  Deadline at_most(std::chrono::nanoseconds timeout) const {
    return Deadline(std::min(timeout, remaining()));
  }

 private:
  std::chrono::nanoseconds timeout_;
  Clock::time_point at_;
};

}  // namespace deep_ep
