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
