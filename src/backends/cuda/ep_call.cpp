#include "backends/cuda/ep_call.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.hpp"

namespace deep_ep::cuda {

int CallContext::num_blocks(std::int64_t wanted, int num_sms) const {
  return static_cast<int>(
      std::clamp<std::int64_t>(wanted, 1, std::min<std::int64_t>(num_sms, max_blocks)));
}

StreamEvent::StreamEvent(std::shared_ptr<const Device> device, std::shared_ptr<Status> status,
                         std::shared_ptr<const std::vector<PeerLink>> links, CUstream stream)
    : device_(std::move(device)), status_(std::move(status)), links_(std::move(links)) {
  constexpr unsigned kWithoutTiming = 2;
  check(driver().cuEventCreate(&event_, kWithoutTiming), "cuEventCreate");
  check(driver().cuEventRecord(event_, stream), "cuEventRecord");
}

StreamEvent::~StreamEvent() { driver().cuEventDestroy(event_); }

bool StreamEvent::is_done() const {
  const CurrentContext current(*device_);
  return driver().cuEventQuery(event_) != kErrorNotReady;
}

void StreamEvent::wait() const { status_->wait_for(event_, *links_); }

void StreamEvent::wait_on(void* stream) const {
  const CurrentContext current(*device_);
  check(driver().cuStreamWaitEvent(static_cast<CUstream>(stream), event_, 0), "cuStreamWaitEvent");
}

StreamOrder::StreamOrder(std::shared_ptr<const Device> device) : device_(std::move(device)) {
  const CurrentContext current(*device_);
  constexpr unsigned kNonBlocking = 1, kWithoutTiming = 2;
  constexpr int kHighPriority = -5;
  check(driver().cuStreamCreateWithPriority(&own_, kNonBlocking, kHighPriority),
        "cuStreamCreateWithPriority");
  check(driver().cuEventCreate(&fork_, kWithoutTiming), "cuEventCreate");
}

StreamOrder::~StreamOrder() {
  last_ = nullptr;
  driver().cuEventDestroy(fork_);
  driver().cuStreamDestroy(own_);
}

CUstream StreamOrder::begin(CUstream caller, bool is_async) {
  const CUstream stream = is_async ? own_ : caller;
  if (is_async) {
    check(driver().cuEventRecord(fork_, caller), "cuEventRecord");
    check(driver().cuStreamWaitEvent(own_, fork_, 0), "cuStreamWaitEvent");
  }
  if (last_ != nullptr && last_stream_ != stream) last_->wait_on(stream);
  return stream;
}

std::shared_ptr<StreamEvent> StreamOrder::end(const CallContext& context, CUstream stream) {
  auto event = std::make_shared<StreamEvent>(context.device, context.status, context.links, stream);
  int is_capturing = 0;
  check(driver().cuStreamIsCapturing(stream, &is_capturing), "cuStreamIsCapturing");
  last_ = is_capturing != 0 ? nullptr : event;  // a point in a graph is none outside of it
  last_stream_ = stream;
  return event;
}

abi::Announcement announcement_of(const CallTerms& terms, std::int64_t num_tokens) {
  abi::Announcement announcement{};
  static_assert(sizeof(CallTerms) <= sizeof(announcement.terms));
  std::memcpy(announcement.terms, &terms, sizeof(CallTerms));
  announcement.num_tokens = num_tokens;
  return announcement;
}

int copy_width(std::int64_t row_bytes, std::initializer_list<const void*> addresses) {
  auto bits = static_cast<std::uint64_t>(row_bytes) | 16;
  for (const void* address : addresses) bits |= reinterpret_cast<std::uintptr_t>(address);
  return static_cast<int>(bits & (~bits + 1));
}

std::shared_ptr<const DeviceRouting> routing_of(const EPHandle& handle) {
  require(handle.routing != nullptr, "the dispatch that made the handle failed");
  return std::static_pointer_cast<const DeviceRouting>(handle.routing);
}

}  // namespace deep_ep::cuda
