#pragma once
// What each rank tells all others before they exchange memory: who it is and where it listens.
#include <optional>
#include <string>
#include <vector>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"
#include "os/process.hpp"

namespace deep_ep {

struct Introduction {
  Id128 process{};              ///< identity of the rank's process
  std::string boot_id;          ///< of the kernel that it runs on
  std::string socket_name;      ///< abstract name where it listens
  Id128 object_key{};           ///< of its LocalObjectOffer
  Id128 token{};                ///< rank 0's becomes the secret of the group
  bool has_descriptor = false;  ///< whether it can share memory with another process
};

/// Collective. The introductions of all ranks. Throws on every rank if any rank gives `own_error`
/// instead, and if the ranks cannot share memory: kUnsupported naming those of another machine,
/// kInvalidArgument naming those without a descriptor among several processes.
std::vector<Introduction> introduce(Bootstrap& bootstrap, const Introduction& own,
                                    const std::optional<Error>& own_error);

}  // namespace deep_ep
