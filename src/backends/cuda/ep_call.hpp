#pragma once
// What dispatch and combine of a CUDA rank have in common.
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "backends/arena.hpp"
#include "backends/cuda/device.hpp"
#include "backends/cuda/kernels.hpp"
#include "backends/cuda/status.hpp"
#include "base/event_state.hpp"
#include "core/call_message.hpp"
#include "deep_ep/abi/ep_params.hpp"

namespace deep_ep::cuda {

/// What the calls of a buffer work with.
struct CallContext {
  std::shared_ptr<const Device> device;
  std::shared_ptr<Kernels> kernels;
  std::shared_ptr<Status> status;
  std::shared_ptr<Arena> arena;
  std::shared_ptr<const std::vector<PeerLink>> links;
  abi::Context abi;
  int max_blocks = 1;  ///< of a kernel that waits: all of them run at a time, beside other ranks'

  /// `num_sms` as far as this GPU has them for this rank.
  int num_blocks(std::int64_t wanted, int num_sms) const;
};

/// A point on a stream.
class StreamEvent : public EventState {
 public:
  /// Records the point after what is on `stream` now.
  StreamEvent(std::shared_ptr<const Device> device, std::shared_ptr<Status> status,
              std::shared_ptr<const std::vector<PeerLink>> links, CUstream stream);
  ~StreamEvent() override;
  StreamEvent(const StreamEvent&) = delete;
  StreamEvent& operator=(const StreamEvent&) = delete;

  bool is_done() const override;
  void wait() const override;
  void wait_on(void* stream) const override;

  /// Keeps an object until this point has been passed for certain: as long as the event.
  void keep(std::shared_ptr<void> object) { kept_.push_back(std::move(object)); }

 private:
  std::shared_ptr<const Device> device_;
  std::shared_ptr<Status> status_;
  std::shared_ptr<const std::vector<PeerLink>> links_;
  CUevent event_ = nullptr;
  std::vector<std::shared_ptr<void>> kept_;
};

/// Orders the calls of a buffer, whatever streams they run on: each starts after the one before.
/// A synchronous call runs on its caller's stream, an asynchronous one on the buffer's own.
class StreamOrder {
 public:
  explicit StreamOrder(std::shared_ptr<const Device> device);
  ~StreamOrder();
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;

  /// The stream to run on, which now waits for the caller's work and for the call before.
  CUstream begin(CUstream caller, bool is_async);
  /// Marks the end of what was put on that stream.
  std::shared_ptr<StreamEvent> end(const CallContext& context, CUstream stream);

  CUstream own() const noexcept { return own_; }

 private:
  std::shared_ptr<const Device> device_;
  CUstream own_ = nullptr;
  CUevent fork_ = nullptr;
  CUstream last_stream_ = nullptr;
  std::shared_ptr<StreamEvent> last_;  // null: none, or in a captured graph
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
