#include "backends/cuda/recorded_event.hpp"

#include <utility>

#include "deep_ep/event.hpp"

namespace deep_ep {

namespace cuda {

RecordedEvent::RecordedEvent(std::shared_ptr<const Device> device, CUstream stream)
    : device_(std::move(device)) {
  const CurrentContext current(*device_);
  constexpr unsigned kWithoutTiming = 2;
  check(driver().cuEventCreate(&event_, kWithoutTiming), "cuEventCreate");
  if (const CUresult result = driver().cuEventRecord(event_, stream); result != kSuccess) {
    driver().cuEventDestroy(event_);
    check(result, "cuEventRecord");
  }
}

RecordedEvent::~RecordedEvent() { driver().cuEventDestroy(event_); }

bool RecordedEvent::is_done() const {
  const CurrentContext current(*device_);
  return driver().cuEventQuery(event_) != kErrorNotReady;
}

void RecordedEvent::wait() const {
  const CurrentContext current(*device_);
  check(driver().cuEventSynchronize(event_), "cuEventSynchronize");
}

void RecordedEvent::wait_on(void* stream) const {
  const CurrentContext current(*device_);
  check(driver().cuStreamWaitEvent(static_cast<CUstream>(stream), event_, 0), "cuStreamWaitEvent");
}

}  // namespace cuda

Event record_event(int cuda_device, void* stream) {
  return Event(std::make_shared<const cuda::RecordedEvent>(
      std::make_shared<const cuda::Device>(cuda_device), static_cast<cuda::CUstream>(stream)));
}

}  // namespace deep_ep
