#pragma once
// When the result of an asynchronous call is ready.
#include <memory>

namespace deep_ep {

class EventState;  // src/base/event_state.hpp

/// A point in the work of a buffer. Copies refer to the same point. All functions are thread-safe.
class Event {
 public:
  /// A point that has already been reached.
  Event() = default;
  explicit Event(std::shared_ptr<const EventState> state) : state_(std::move(state)) {}

  /// True once the work is over, whether it succeeded or failed.
  bool is_done() const noexcept;

  /// Blocks until the work is over. Every operation has a time limit, so this ends.
  /// Throws the Error that the work ended with, on each call.
  void wait() const;

  /// Makes what is put on a CUDA stream (a `CUstream`) from now on start after the work. Work of
  /// CPU ranks is waited for at once.
  void wait_on(void* stream) const;

 private:
  std::shared_ptr<const EventState> state_;
};

/// A point after all that has been put on `stream`, a `CUstream` of the GPU `cuda_device`. Throws
/// kUnsupported, kDevice.
Event record_event(int cuda_device, void* stream);

}  // namespace deep_ep
