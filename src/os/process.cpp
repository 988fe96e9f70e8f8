#include "os/process.hpp"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "base/check.hpp"
#include "os/system_error.hpp"

namespace deep_ep {
namespace {

// Beside the function that draws it: the handler of fork() must not enter that one's
// initialisation.
Id128 own_identity;

}  // namespace

Id128 random_id() {
  Id128 id;
  // up to 256 bytes come whole or not at all
  while (::getrandom(id.data(), id.size(), 0) != static_cast<ssize_t>(id.size())) {
    if (errno != EINTR) throw_system_error(errno, "getrandom of ", id.size(), " bytes");
  }
  return id;
}

std::string hex(const Id128& id) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::uint8_t byte : id) {
    text += kDigits[byte >> 4U];
    text += kDigits[byte & 15U];
  }
  return text;
}

Id128 process_identity() {
  static const bool is_drawn = [] {
    own_identity = random_id();
    const int error = ::pthread_atfork(nullptr, nullptr, [] { own_identity = random_id(); });
    if (error != 0) throw_system_error(error, "pthread_atfork");
    return true;
  }();
  internal_check(is_drawn, "the identity is drawn before it is read");
  return own_identity;
}

OwnerProcess::OwnerProcess() noexcept : pid_(::getpid()) {}

bool OwnerProcess::is_current() const noexcept { return ::getpid() == pid_; }

void OwnerProcess::require_current(const char* what) const {
  require(is_current(), what, " was made by process ", pid_, " and cannot be used by process ",
          ::getpid(), ": make one after the fork");
}

std::string boot_id() {
  constexpr const char* kPath = "/proc/sys/kernel/random/boot_id";
  const UniqueFd fd(::open(kPath, O_RDONLY | O_CLOEXEC));
  if (!fd) throw_system_error(errno, "open ", kPath);
  std::array<char, 64> text{};  // a UUID of 36 characters and a line end
  const ssize_t num_read = ::read(fd.get(), text.data(), text.size());
  if (num_read <= 0) throw_system_error(num_read < 0 ? errno : ENODATA, "read ", kPath);
  std::string id(text.data(), static_cast<std::size_t>(num_read));
  while (!id.empty() && id.back() == '\n') id.pop_back();
  return id;
}

UniqueFd open_pidfd(pid_t pid) {
  // no wrapper before glibc 2.36; the kernel has it since 5.3 and sets CLOEXEC itself
  UniqueFd fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (fd) return fd;
  const int error = errno;
  if (error == ESRCH) throw Error(ErrorCode::kPeer, concat("process ", pid, " has ended"));
  if (error == ENOSYS || error == EPERM || error == EINVAL) return {};
  throw_system_error(error, "pidfd_open ", pid);
}

bool has_exited(const UniqueFd& pidfd) noexcept {
  pollfd query{.fd = pidfd.get(), .events = POLLIN, .revents = 0};
  return ::poll(&query, 1, 0) > 0 && (query.revents & POLLIN) != 0;
}

}  // namespace deep_ep
