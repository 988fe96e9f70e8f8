#pragma once
// The protocol of a call as the kernels of one rank see it: announce, offer, wait, finish. Every
// wait has a limit; one that runs out leaves a fault for the host, tells the peers, and ends the
// kernel.
#include <cstdint>

#include "deep_ep/abi/ep_params.hpp"
#include "deep_ep/device/memory_order.cuh"

namespace deep_ep::device {

using abi::Announcement;
using abi::Context;
using abi::Control;
using abi::Offer;
using abi::Stage;

/// One call of one rank. Made by every thread; functions named `block_` are called by all threads of
/// a block.
class Call {
 public:
  __device__ explicit Call(const Context& context)
      : context_(context), number_(control().num_calls + 1) {}

  __device__ std::uint64_t number() const { return number_; }
  __device__ Control& control() const {
    return *reinterpret_cast<Control*>(context_.window + context_.layout.control);
  }
  __device__ bool has_fault() const { return load_acquire_gpu(&control().fault) != 0; }
  /// An earlier kernel of this call found that the ranks disagree.
  __device__ bool has_problem() const { return control().problem == number_; }

  /// What rank `source` wrote into the window of rank `owner`.
  __device__ Announcement& announcement(int owner, int source) const {
    return at<Announcement>(owner, context_.layout.announcements)[slot(source)];
  }
  __device__ Offer& offer(int owner, int source) const {
    return at<Offer>(owner, context_.layout.offers)[slot(source)];
  }
  __device__ std::int32_t* counts(int owner, int source) const {
    return at<std::int32_t>(owner,
                            context_.layout.counts + slot(source) * context_.layout.counts_stride);
  }

  /// One warp: says to `peer` that this rank has come to `stage`, after all that the warp's threads
  /// wrote, and all that they know to have been written.
  __device__ void warp_post(int peer, Stage stage) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      __threadfence_system();
      store_release_sys(&word(peer, context_.rank_idx).value, abi::stage_word(number_, stage));
    }
  }

  /// One warp: writes a copy of 16-byte words.
  template <typename T>
  __device__ static void warp_write(T& target, const T& source) {
    static_assert(sizeof(T) % 16 == 0);
    const auto* from = reinterpret_cast<const uint4*>(&source);
    auto* to = reinterpret_cast<uint4*>(&target);
    for (unsigned i = threadIdx.x % 32; i < sizeof(T) / 16; i += 32) to[i] = from[i];
  }

  /// Waits until all ranks have come to `stage`. False: they did not, and there is a fault.
  __device__ bool block_wait(Stage stage, abi::Site site) const {
    bool failed = false;
    for (int peer = static_cast<int>(threadIdx.x); peer < context_.num_ranks && !failed;
         peer += static_cast<int>(blockDim.x)) {
      failed = !wait(peer, abi::stage_word(number_, stage), site);
    }
    return __syncthreads_or(failed) == 0;
  }

  /// Whether the announcements say that all ranks can make this call, and mean the same. The first
  /// block tells the host if not. After block_wait(kAnnounced).
  __device__ bool block_agrees() const {
    const Announcement& first = announcement(context_.rank_idx, 0);
    bool disagrees = false;
    for (int peer = static_cast<int>(threadIdx.x); peer < context_.num_ranks;
         peer += static_cast<int>(blockDim.x)) {
      const Announcement& other = announcement(context_.rank_idx, peer);
      disagrees |= other.refusal != abi::Refusal::kNone;
      for (int i = 0; i < abi::kNumTerms; ++i) disagrees |= other.terms[i] != first.terms[i];
    }
    if (__syncthreads_or(disagrees) == 0) return true;
    if (blockIdx.x == 0) block_report_problem();
    return false;
  }

  /// The beginning of a kernel that moves rows: the first block writes this rank's announcement
  /// (null: an earlier kernel of the call did, and all ranks agreed) and offer to all ranks, and
  /// every block takes those of all ranks into `offers`, which is shared memory.
  enum class Opening { kOpen, kDisagreed, kFault };
  __device__ Opening block_open(const Announcement* announcement_of_call, const Offer& own_offer,
                                Offer* offers) const {
    if (blockIdx.x == 0) announce_to_all(announcement_of_call, &own_offer, Stage::kOffered);
    if (announcement_of_call != nullptr) {
      if (!block_wait(Stage::kAnnounced, abi::Site::kAnnounced)) return Opening::kFault;
      if (!block_agrees()) return Opening::kDisagreed;
    }
    if (!block_wait(Stage::kOffered, abi::Site::kOffered)) return Opening::kFault;
    for (int rank = static_cast<int>(threadIdx.x); rank < context_.num_ranks;
         rank += static_cast<int>(blockDim.x)) {
      offers[rank] = offer(context_.rank_idx, rank);
    }
    __syncthreads();
    return Opening::kOpen;
  }

  /// Waits until all blocks of the grid have come here. False: there is a fault. Once a kernel.
  __device__ bool block_meet_grid() const {
    __syncthreads();
    bool failed = false;
    if (threadIdx.x == 0) {
      __threadfence();
      std::uint32_t* const met = &control().num_met;
      atomicAdd(met, 1u);
      const std::uint64_t start = now_ns();
      while (load_acquire_gpu(met) < gridDim.x && !failed) {
        failed = has_fault() || gave_up(start);
        if (failed) fault(context_.rank_idx, load_acquire_gpu(met), abi::Site::kBlocks, false);
      }
    }
    return __syncthreads_or(failed) == 0;
  }

  /// True for all threads of the block that came last to this point of the kernel; what the other
  /// blocks wrote before is visible to it. Words: num_arrived, num_finished.
  __device__ bool block_is_last(std::uint32_t& counter) const {
    __shared__ bool is_last;
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
      is_last = atomicAdd(&counter, 1u) == gridDim.x - 1;
      __threadfence_system();
    }
    __syncthreads();
    return is_last;
  }

  /// The last block, once: the grid's words are as before, and the call is over if `ends_call`.
  __device__ void reset(bool ends_call) const {
    if (threadIdx.x != 0) return;
    Control& own = control();
    own.num_arrived = 0;
    own.num_finished = 0;
    own.num_met = 0;
    if (!ends_call) return;
    own.refusal = 0;
    own.num_calls = number_;
  }

  /// Every block, at the end of a kernel that only found a problem.
  __device__ void block_end_on_problem(bool ends_call) const {
    if (!block_is_last(control().num_finished)) return;
    if (threadIdx.x == 0) control().problem = number_;
    reset(ends_call);
  }

  /// Every block, at the end of a call: the last one tells the peers, and waits for them if
  /// `waits`, so that all that is read or written here has been.
  __device__ void block_end(bool ends_call) const {
    if (!block_is_last(control().num_finished)) return;
    post_to_all(Stage::kDone);
    if (ends_call && !block_wait(Stage::kDone, abi::Site::kDone)) return;
    reset(ends_call);
  }

  /// Every thread of a block: posts to all ranks, this one included.
  __device__ void post_to_all(Stage stage) const {
    for (int peer = static_cast<int>(threadIdx.x / 32); peer < context_.num_ranks;
         peer += static_cast<int>(blockDim.x / 32)) {
      warp_post(peer, stage);
    }
  }

  /// Every thread of a block: writes the announcement and the offer to all ranks, and posts.
  __device__ void announce_to_all(const Announcement* announcement_of_call, const Offer* own_offer,
                                  Stage stage) const {
    for (int peer = static_cast<int>(threadIdx.x / 32); peer < context_.num_ranks;
         peer += static_cast<int>(blockDim.x / 32)) {
      if (announcement_of_call != nullptr) {
        warp_write(announcement(peer, context_.rank_idx), *announcement_of_call);
      }
      if (own_offer != nullptr) warp_write(offer(peer, context_.rank_idx), *own_offer);
      __threadfence_system();
      warp_post(peer, stage);
    }
  }

  /// Tells the peers that this rank makes no more calls, and this rank's kernels.
  __device__ void leave() const {
    atomicExch(&control().fault, 1u);
    for (int peer = 0; peer < context_.num_ranks; ++peer) {
      if (peer != context_.rank_idx) {
        store_release_sys(&word(peer, context_.rank_idx).is_gone, 1);
      }
    }
  }

 private:
  template <typename T>
  __device__ T* at(int owner, std::int64_t offset) const {
    return reinterpret_cast<T*>(context_.windows[owner] + offset);
  }
  __device__ std::int64_t slot(int source) const {
    return static_cast<std::int64_t>(number_ % 2) * context_.num_ranks + source;
  }
  __device__ abi::StageWord& word(int owner, int source) const {
    return at<abi::StageWord>(owner, context_.layout.stages)[source];
  }

  __device__ bool gave_up(std::uint64_t start) const {
    const std::uint64_t waited = now_ns() - start;
    // Looking at the host's memory takes as long as many looks at the device's.
    constexpr std::uint64_t kPatienceNs = 100'000;
    return waited > context_.timeout_ns ||
           (waited > kPatienceNs && load_acquire_sys(&context_.host->abort) != 0);
  }

  __device__ bool wait(int peer, std::uint64_t target, abi::Site site) const {
    const abi::StageWord& awaited = word(context_.rank_idx, peer);
    const std::uint64_t start = now_ns();
    while (load_acquire_sys(&awaited.value) < target) {
      const bool is_gone = load_acquire_sys(&awaited.is_gone) != 0;
      if (!is_gone && !has_fault() && !gave_up(start)) continue;
      const std::uint64_t seen = load_acquire_sys(&awaited.value);
      if (seen >= target) return true;  // its last deed before it went
      fault(peer, seen, site, is_gone);
      return false;
    }
    return true;
  }

  // The first thread that fails says why; the others find the fault.
  __device__ void fault(int peer, std::uint64_t observed, abi::Site site, bool is_gone) const {
    if (atomicExch(&control().fault, 1u) != 0) return;
    abi::Fault& record = context_.host->fault;
    record.call = number_;
    record.observed = observed;
    record.peer = peer;
    record.site = site;
    record.is_gone = is_gone ? 1 : 0;
    record.was_aborted = load_acquire_sys(&context_.host->abort);
    __threadfence_system();
    store_release_sys(&record.is_set, 1u);
    leave();
  }

  __device__ void block_report_problem() const {
    for (int peer = static_cast<int>(threadIdx.x / 32); peer < context_.num_ranks;
         peer += static_cast<int>(blockDim.x / 32)) {
      warp_write(context_.host_announcements[peer], announcement(context_.rank_idx, peer));
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) store_release_sys(&context_.host->problem, number_);
  }

  const Context& context_;
  const std::uint64_t number_;
};

}  // namespace deep_ep::device
