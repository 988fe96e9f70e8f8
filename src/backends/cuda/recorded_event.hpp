#pragma once
// A point on a CUDA stream.
#include <memory>

#include "backends/cuda/device.hpp"
#include "base/event_state.hpp"

namespace deep_ep::cuda {

class RecordedEvent : public EventState {
 public:
  /// Records the point after what is on `stream` now.
  RecordedEvent(std::shared_ptr<const Device> device, CUstream stream);
  ~RecordedEvent() override;
  RecordedEvent(const RecordedEvent&) = delete;
  RecordedEvent& operator=(const RecordedEvent&) = delete;

  bool is_done() const override;
  void wait() const override;
  void wait_on(void* stream) const override;

 protected:
  CUevent event() const noexcept { return event_; }

 private:
  std::shared_ptr<const Device> device_;
  CUevent event_ = nullptr;
};

}  // namespace deep_ep::cuda
