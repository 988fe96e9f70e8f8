#pragma once
// What a rank holds of another rank after they have met.
#include <memory>
#include <utility>

#include "os/fd.hpp"

namespace deep_ep {

/// A peer after the exchange: its shared memory descriptor, or (ranks of one process) its object;
/// and whether it is still there. Any thread may ask.
class PeerLink {
 public:
  /// A rank of this process without an object.
  PeerLink() = default;

  /// A rank of this process, this rank itself included.
  explicit PeerLink(std::shared_ptr<void> object) : object_(std::move(object)) {}

  /// A rank of another process: what it sent through `channel`, a Unix socket that stays open so
  /// that its end can be seen. Throws kPeer if that process has ended already, kSystem.
  PeerLink(UniqueFd descriptor, UniqueFd channel);

  bool is_same_process() const noexcept { return !channel_; }

  const UniqueFd& descriptor() const noexcept { return descriptor_; }  ///< empty in this process
  const std::shared_ptr<void>& object() const noexcept {
    return object_;
  }  ///< null in another process

  /// False once the system says that the process is gone, or that it has dropped its link to us.
  /// Always true for a rank of this process.
  bool is_alive() const noexcept;

 private:
  std::shared_ptr<void> object_;
  UniqueFd descriptor_;
  UniqueFd channel_;
  UniqueFd
      process_;  ///< sees the end where the channel does not: a forked child may hold that open
};

}  // namespace deep_ep
