#pragma once
// The order of a buffer's calls on the GPU, whatever streams they run on, and what it means for
// calls that are captured into graphs.
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "backends/cuda/recorded_event.hpp"
#include "backends/cuda/status.hpp"

namespace deep_ep::cuda {

/// The capture that a stream takes part in.
struct Capture {
  std::uint64_t id = 0;  ///< 0: none
  CUgraph graph = nullptr;

  bool is_active() const noexcept { return id != 0; }
};

/// Throws kDevice if the stream cannot be used now.
Capture capture_of(const Device& device, CUstream stream);

/// A point in the work of a buffer: waiting for it looks for faults, too.
class CallEvent : public RecordedEvent {
 public:
  CallEvent(std::shared_ptr<const Device> device, std::shared_ptr<Status> status,
            std::shared_ptr<const std::vector<PeerLink>> links, CUstream stream)
      : RecordedEvent(std::move(device), stream),
        status_(std::move(status)),
        links_(std::move(links)) {}

  void wait() const override { status_->wait_for(event(), *links_); }

  /// Keeps an object as long as this event.
  void keep(std::shared_ptr<void> object) { kept_ = std::move(object); }

 private:
  std::shared_ptr<Status> status_;
  std::shared_ptr<const std::vector<PeerLink>> links_;
  std::shared_ptr<void> kept_;
};

/// Each call starts after the one before, and after what its caller's stream, and that of the call
/// before, held when it was made: blocks that came back to the arena may still be read there.
/// A synchronous call runs on its caller's stream, an asynchronous one on the buffer's own.
/// So a stream must live until the next call was made. Calls in a graph are ordered among
/// themselves; replays are the caller's to order.
class StreamOrder {
 public:
  StreamOrder(std::shared_ptr<const Device> device, std::shared_ptr<Status> status,
              std::shared_ptr<const std::vector<PeerLink>> links);
  ~StreamOrder();
  StreamOrder(const StreamOrder&) = delete;
  StreamOrder& operator=(const StreamOrder&) = delete;

  /// Makes what is put on a stream from now on start after what another one holds.
  void follow(CUstream stream, CUstream awaited);

  /// The stream for the next call.
  CUstream begin(CUstream caller, bool is_async);

  /// The buffer's own stream, for a deed after the last call: waits for no caller's stream, which
  /// may be gone.
  CUstream begin_last();

  /// Marks the end of what was put on that stream, and keeps the call's inputs until it is passed
  /// (in a graph: as long as the event).
  std::shared_ptr<CallEvent> end(CUstream stream, std::shared_ptr<void> inputs = nullptr);

  CUstream own() const noexcept { return own_; }

 private:
  // The last call that was run, or captured into one graph.
  struct Last {
    std::uint64_t capture_id = 0;
    CUstream stream = nullptr, caller = nullptr;
    std::shared_ptr<CallEvent> event;  // null: there was no call
  };
  std::shared_ptr<const Device> device_;
  std::shared_ptr<Status> status_;
  std::shared_ptr<const std::vector<PeerLink>> links_;
  CUstream own_ = nullptr;
  CUevent fork_ = nullptr;
  Last run_, captured_;
  Last* current_ = &run_;
  std::deque<std::pair<std::shared_ptr<CallEvent>, std::shared_ptr<void>>> in_flight_;
};

}  // namespace deep_ep::cuda
