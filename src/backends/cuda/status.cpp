#include "backends/cuda/status.hpp"

#include <sched.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <utility>

#include "base/check.hpp"
#include "core/call_message.hpp"

namespace deep_ep::cuda {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kAnnouncementsOffset =
    abi::align_up(static_cast<std::int64_t>(sizeof(abi::HostStatus)) + 4 * kMaxExperts, 64);
constexpr std::int64_t kExpertCountsOffset =
    abi::align_up(static_cast<std::int64_t>(sizeof(abi::HostStatus)), 64);

template <typename T>
T load_acquire(const T& word) {
  return std::atomic_ref(const_cast<T&>(word)).load(std::memory_order_acquire);
}

std::string stage_text(std::uint64_t observed, std::uint64_t call) {
  const std::uint64_t at_call = observed / abi::kStagesPerCall;
  if (at_call < call) {
    return at_call == 0 ? "did not arrive (it made no call yet)"
                        : concat("did not arrive (it is in or after call ", at_call, ")");
  }
  switch (static_cast<abi::Stage>(observed % abi::kStagesPerCall)) {
    case abi::Stage::kAnnounced:
      return "arrived, but got no further than announcing the call";
    case abi::Stage::kOffered:
      return "arrived and offered memory, but did not finish moving rows";
    case abi::Stage::kDone:
      return "is done with it";
  }
  return "is in an unknown stage";
}

// The header that core knows from an announcement.
CallHeader header_of(const abi::Announcement& announcement) {
  CallHeader header;
  static_assert(sizeof(CallTerms) <= sizeof(announcement.terms));
  std::memcpy(&header.terms, announcement.terms, sizeof(CallTerms));
  header.num_tokens = announcement.num_tokens;
  std::string reason;
  switch (announcement.refusal) {
    case abi::Refusal::kNone:
      return header;
    case abi::Refusal::kReason:
      reason.assign(announcement.reason,
                    ::strnlen(announcement.reason, sizeof(announcement.reason)));
      break;
    case abi::Refusal::kIdTooLarge:
      reason = concat("topk_idx must be below num_experts ", header.terms.num_experts, ", got ",
                      announcement.bad_value, " for token ", announcement.bad_token, ", lane ",
                      announcement.bad_lane);
      break;
    case abi::Refusal::kTooManyLanes:
      reason = concat("expanded dispatch without CPU sync has no room for ", announcement.bad_value,
                      " lanes of a token on one rank, for token ", announcement.bad_token,
                      "; an expert repeated in a row needs do_cpu_sync");
      break;
  }
  header.terms.operation = static_cast<std::int64_t>(Operation::kRefused);
  reason.copy(header.reason.data(), header.reason.size() - 1);
  return header;
}

}  // namespace

Status::Status(std::shared_ptr<const Device> device, const Topology& topology,
               std::chrono::nanoseconds timeout)
    : device_(std::move(device)), topology_(topology), timeout_(timeout) {
  const CurrentContext current(*device_);
  const std::int64_t num_bytes =
      kAnnouncementsOffset +
      topology.num_ranks * static_cast<std::int64_t>(sizeof(abi::Announcement));
  constexpr unsigned kPortable = 1, kDeviceMapped = 2;
  void* memory = nullptr;
  check(driver().cuMemHostAlloc(&memory, static_cast<std::size_t>(num_bytes),
                                kPortable | kDeviceMapped),
        "cuMemHostAlloc");
  std::memset(memory, 0, static_cast<std::size_t>(num_bytes));
  host_ = static_cast<abi::HostStatus*>(memory);
  auto* const bytes = static_cast<std::byte*>(memory);
  expert_counts_ = reinterpret_cast<std::int32_t*>(bytes + kExpertCountsOffset);
  announcements_ = reinterpret_cast<abi::Announcement*>(bytes + kAnnouncementsOffset);
  check(driver().cuMemHostGetDevicePointer(&device_address_, memory, 0),
        "cuMemHostGetDevicePointer");
}

Status::~Status() { driver().cuMemFreeHost(host_); }

void Status::describe(abi::Context& context) const {
  context.host = reinterpret_cast<abi::HostStatus*>(device_address_);
  context.host_announcements =
      reinterpret_cast<abi::Announcement*>(device_address_ + kAnnouncementsOffset);
  context.timeout_ns = static_cast<std::uint64_t>(timeout_.count());
}

std::int32_t* Status::device_expert_counts() const {
  return reinterpret_cast<std::int32_t*>(device_address_ + kExpertCountsOffset);
}

void Status::throw_if_broken() const {
  const std::scoped_lock lock(mutex_);
  if (broken_) throw Error(*broken_);
  if (load_acquire(host().fault.is_set) != 0) throw fault_error();
}

void Status::throw_if_disagreed() {
  const std::scoped_lock lock(mutex_);
  const std::uint64_t problem = load_acquire(host().problem);
  if (problem == reported_problem_) return;
  reported_problem_ = problem;
  std::vector<CallHeader> headers;
  for (int rank = 0; rank < topology_.num_ranks; ++rank) {
    headers.push_back(header_of(announcements_[rank]));
  }
  const auto& own = headers[static_cast<std::size_t>(topology_.rank_idx)];
  // Its caller made a mistake, or its peers.
  const bool is_own = announcements_[topology_.rank_idx].refusal != abi::Refusal::kNone;
  if (is_own) throw Error(ErrorCode::kInvalidArgument, own.reason.data());
  const auto found = find_problem(headers);
  throw Error(found && !found->is_refusal ? ErrorCode::kInvalidArgument : ErrorCode::kPeer,
              concat(prefix(problem), found ? found->text : "the ranks disagreed"));
}

Status::Counts Status::wait_for_counts(std::uint64_t ticket, int num_local_experts,
                                       const std::vector<PeerLink>& links) {
  // Kernels end before this; it is for a device that does not run them.
  const auto deadline = Clock::now() + timeout_ + std::chrono::seconds(30);
  for (int look = 0; load_acquire(host().received.ticket) < ticket; ++look) {
    throw_if_broken();
    if (look > 1000) {
      if (look % 1000 == 0) abort_if_peer_died(links);
      if (Clock::now() > deadline) {
        throw Error(ErrorCode::kTimeout,
                    concat("rank ", topology_.rank_idx, "/", topology_.num_ranks,
                           ": the GPU did not begin the call in time: is its stream blocked?"));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(look > 10'000 ? 50 : 1));
    } else {
      ::sched_yield();
    }
  }
  throw_if_disagreed();
  Counts counts{.num_tokens = host().received.num_tokens,
                .num_aligned_rows = host().received.num_aligned_rows,
                .of_experts = {expert_counts_, expert_counts_ + num_local_experts}};
  return counts;
}

void Status::wait_for(CUevent event, const std::vector<PeerLink>& links) {
  const CurrentContext current(*device_);
  for (int look = 0;; ++look) {
    const CUresult result = driver().cuEventQuery(event);
    if (result == kSuccess) break;
    if (result != kErrorNotReady) check(result, "cuEventQuery");
    if (look < 1000) continue;
    if (look % 1000 == 0) abort_if_peer_died(links);
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  throw_if_broken();
  throw_if_disagreed();
}

void Status::break_off(const Error& error) {
  const std::scoped_lock lock(mutex_);
  if (!broken_) broken_ = error;
}

void Status::abort_if_peer_died(const std::vector<PeerLink>& links) {
  for (std::size_t rank = 0; rank < links.size(); ++rank) {
    if (links[rank].is_alive()) continue;
    const std::scoped_lock lock(mutex_);
    dead_ranks_ = std::to_string(rank);
    std::atomic_ref(host_->abort).store(1, std::memory_order_release);
  }
}

Error Status::fault_error() const {
  const abi::Fault& fault = host().fault;
  const std::string text = prefix(fault.call);
  if (!dead_ranks_.empty()) {
    return Error(ErrorCode::kPeer,
                 concat(text, "rank ", dead_ranks_, " is gone: its process has ended"));
  }
  if (fault.is_gone != 0) {
    return Error(ErrorCode::kPeer,
                 concat(text, "rank ", fault.peer,
                        " left: it destroyed its buffer, or a wait of its own ran out"));
  }
  if (fault.was_aborted != 0) {
    return Error(ErrorCode::kPeer, concat(text, "given up: the buffer is being destroyed"));
  }
  const double seconds = std::chrono::duration<double>(timeout_).count();
  if (fault.site == abi::Site::kBlocks) {
    return Error(ErrorCode::kTimeout,
                 concat(text, "waited ", seconds, " s for this GPU to run all blocks of a kernel; ",
                        fault.observed, " came: is it busy with kernels that do not end?"));
  }
  return Error(ErrorCode::kTimeout, concat(text, "waited ", seconds, " s for rank ", fault.peer,
                                           ", which ", stage_text(fault.observed, fault.call)));
}

std::string Status::prefix(std::uint64_t call) const {
  return concat("rank ", topology_.rank_idx, "/", topology_.num_ranks, ": call ", call, ": ");
}

}  // namespace deep_ep::cuda
