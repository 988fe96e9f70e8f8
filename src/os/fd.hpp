#pragma once
// The owner of a file descriptor.
#include <unistd.h>

#include "base/unique.hpp"

namespace deep_ep {

struct FdTraits {
  using Handle = int;
  static constexpr int kNull = -1;
  // The result is of no use: on Linux the descriptor is free again even after EINTR.
  static void close(int fd) noexcept { ::close(fd); }
};

using UniqueFd = Unique<FdTraits>;

}  // namespace deep_ep
