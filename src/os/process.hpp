#pragma once
// Which process and which kernel this is, and whether another process still runs.
#include <sys/types.h>

#include <array>
#include <cstdint>
#include <string>

#include "os/fd.hpp"

namespace deep_ep {

/// 128 random bits: equal only if copied.
using Id128 = std::array<std::uint8_t, 16>;

/// Fresh bits from the kernel, fit for secrets. Throws kSystem.
Id128 random_id();

/// 32 hexadecimal digits.
std::string hex(const Id128& id);

/// The identity of this process: the same in all its threads, another one in a forked child.
/// Unlike a pid it is never reused and means the same in every pid namespace. Throws kSystem.
Id128 process_identity();

/// Remembers the process that made an object. A forked child holds a copy of the object, but the
/// threads and the peers behind it are its parent's: it must not talk to them.
class OwnerProcess {
 public:
  OwnerProcess() noexcept;
  bool is_current() const noexcept;

  /// Throws kInvalidArgument, naming the object `what`, in any process but the one that made it.
  void require_current(const char* what) const;

 private:
  pid_t pid_;
};

/// Identity of the running kernel: equal for all processes and containers of a machine until it
/// reboots. Throws kSystem.
std::string boot_id();

/// A descriptor that has_exited() can ask about the process `pid`; it stays with this process even
/// when the pid is reused. Empty if the kernel or a sandbox has none for us; throws kPeer if no
/// such process runs.
UniqueFd open_pidfd(pid_t pid);

/// Whether the process behind a pidfd has ended, be it not reaped yet.
bool has_exited(const UniqueFd& pidfd) noexcept;

}  // namespace deep_ep
