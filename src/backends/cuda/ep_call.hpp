#pragma once
// What dispatch and combine of a CUDA rank have in common.
#include <cstdint>
#include <memory>
#include <vector>

#include "backends/arena.hpp"
#include "backends/cuda/device.hpp"
#include "backends/cuda/kernels.hpp"
#include "backends/cuda/stream_order.hpp"
#include "backends/cuda/window.hpp"
#include "core/call_message.hpp"
#include "deep_ep/abi/ep_params.hpp"

namespace deep_ep::cuda {

/// What the calls of a buffer work with.
struct CallContext {
  std::shared_ptr<const Device> device;
  std::shared_ptr<Kernels> kernels;
  std::shared_ptr<Status> status;
  std::shared_ptr<Arena> arena;    ///< says what lies in the window
  std::shared_ptr<Lender> lender;  ///< the arena, or the pool of captured graphs
  std::shared_ptr<const std::vector<PeerLink>> links;
  std::shared_ptr<const std::vector<std::shared_ptr<Window>>> windows;  ///< by rank
  Tensor table;  ///< their addresses, on the device
  abi::Context abi;
  int max_blocks = 1;  ///< of a kernel that waits: all of them run at a time, beside other ranks'

  /// `num_sms` as far as this GPU has them for this rank.
  int num_blocks(std::int64_t wanted, int num_sms) const;
};

/// The announcement of a call with these terms.
abi::Announcement announcement_of(const CallTerms& terms, std::int64_t num_tokens);

/// The widest access (16, 8, 4, 2 or 1 bytes) that fits rows of this size at these addresses.
int copy_width(std::int64_t row_bytes, std::initializer_list<const void*> addresses);

/// Device memory behind a handle: see abi::Lane and abi::Received.
struct DeviceRouting {
  Tensor lanes, received;
};

/// The routing behind a handle. Throws kInvalidArgument if its dispatch failed.
std::shared_ptr<const DeviceRouting> routing_of(const EPHandle& handle);

}  // namespace deep_ep::cuda
