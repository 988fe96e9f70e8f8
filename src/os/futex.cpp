#include "os/futex.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <ctime>

#include "os/system_error.hpp"

namespace deep_ep {

// Neither operation is FUTEX_PRIVATE_FLAG: that would look only among the threads of this process.

FutexResult futex_wait(const std::uint32_t* word, std::uint32_t expected, std::int64_t timeout_ns) {
  constexpr std::int64_t kNsPerSec = 1'000'000'000;
  timeout_ns = std::max<std::int64_t>(timeout_ns, 0);
  timespec timeout{};
  timeout.tv_sec = timeout_ns / kNsPerSec;
  timeout.tv_nsec = timeout_ns % kNsPerSec;
  if (::syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, nullptr, 0) == 0) {
    return FutexResult::kWoken;
  }
  const int error = errno;
  if (error == EAGAIN) return FutexResult::kChanged;
  if (error == ETIMEDOUT) return FutexResult::kTimeout;
  if (error == EINTR) return FutexResult::kWoken;
  throw_system_error(error, "futex FUTEX_WAIT at ", static_cast<const void*>(word));
}

void futex_wake_all(std::uint32_t* word) {
  if (::syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0) < 0) {
    throw_system_error(errno, "futex FUTEX_WAKE at ", static_cast<const void*>(word));
  }
}

}  // namespace deep_ep
