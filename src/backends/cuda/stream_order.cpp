#include "backends/cuda/stream_order.hpp"

namespace deep_ep::cuda {

Capture capture_of(const Device& device, CUstream stream) {
  const CurrentContext current(device);
  constexpr int kActive = 1;
  int status = 0;
  Capture capture;
  check(driver().cuStreamGetCaptureInfo(stream, &status, &capture.id, &capture.graph, nullptr,
                                        nullptr),
        "cuStreamGetCaptureInfo");
  return status == kActive ? capture : Capture{};
}

StreamOrder::StreamOrder(std::shared_ptr<const Device> device, std::shared_ptr<Status> status,
                         std::shared_ptr<const std::vector<PeerLink>> links)
    : device_(std::move(device)), status_(std::move(status)), links_(std::move(links)) {
  const CurrentContext current(*device_);
  constexpr unsigned kNonBlocking = 1, kWithoutTiming = 2;
  constexpr int kHighPriority = -5;
  check(driver().cuStreamCreateWithPriority(&own_, kNonBlocking, kHighPriority),
        "cuStreamCreateWithPriority");
  check(driver().cuEventCreate(&fork_, kWithoutTiming), "cuEventCreate");
}

StreamOrder::~StreamOrder() {
  driver().cuEventDestroy(fork_);
  driver().cuStreamDestroy(own_);
}

void StreamOrder::follow(CUstream stream, CUstream awaited) {
  if (stream == awaited) return;
  const CurrentContext current(*device_);
  check(driver().cuEventRecord(fork_, awaited), "cuEventRecord");
  check(driver().cuStreamWaitEvent(stream, fork_, 0), "cuStreamWaitEvent");
}

CUstream StreamOrder::begin(CUstream caller, bool is_async) {
  const std::uint64_t capture_id = capture_of(*device_, caller).id;
  const CUstream stream = is_async ? own_ : caller;
  while (!in_flight_.empty() && capture_id == 0 && in_flight_.front().first->is_done()) {
    in_flight_.pop_front();
  }
  current_ = capture_id == 0 ? &run_ : &captured_;
  if (current_->capture_id != capture_id) {
    *current_ = {};
    current_->capture_id = capture_id;
  }
  follow(stream, caller);
  if (current_->event != nullptr) {
    if (current_->stream != stream) current_->event->wait_on(stream);
    if (current_->caller != caller) follow(stream, current_->caller);
  }
  current_->caller = caller;
  return stream;
}

CUstream StreamOrder::begin_last() {
  if (run_.event != nullptr) run_.event->wait_on(own_);
  return own_;
}

std::shared_ptr<CallEvent> StreamOrder::end(CUstream stream, std::shared_ptr<void> inputs) {
  auto event = std::make_shared<CallEvent>(device_, status_, links_, stream);
  current_->event = event;
  current_->stream = stream;
  if (inputs == nullptr) return event;
  if (current_ == &run_) {
    in_flight_.emplace_back(event, std::move(inputs));
  } else {
    event->keep(std::move(inputs));
  }
  return event;
}

}  // namespace deep_ep::cuda
