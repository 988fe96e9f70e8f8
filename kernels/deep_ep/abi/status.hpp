#pragma once
// What kernels tell the host: memory of the host that the device can write.
#include <cstdint>

#include "deep_ep/abi/window.hpp"

namespace deep_ep::abi {

/// Which wait ran out.
enum class Site : std::uint32_t { kNone = 0, kAnnounced, kOffered, kDone, kBlocks };

/// Why a buffer takes no more calls.
struct Fault {
  std::uint64_t call;
  std::uint64_t observed;  ///< the stage word that was awaited (site kBlocks: blocks that came)
  std::int32_t peer;       ///< rank that was awaited
  Site site;
  std::uint32_t is_gone;      ///< 1: the peer had said that it makes no more calls
  std::uint32_t was_aborted;  ///< 1: the host asked for the end of the wait
  std::uint32_t is_set;       ///< written last
  std::uint32_t unused;
};

/// What a rank receives, for a host that waits for it.
struct ReceivedCounts {
  std::int64_t num_tokens;        ///< N
  std::int64_t num_aligned_rows;  ///< sum of aligned expert counts
  std::uint64_t ticket;           ///< of the call that they belong to; written last
};

/// One a buffer; the fixed part of the host's memory. Counts of local experts follow it, then
/// announcements of all ranks.
struct HostStatus {
  Fault fault;
  std::uint32_t abort;  ///< the host sets it: end every wait
  ReceivedCounts received;
  std::uint64_t problem;  ///< the last call that the ranks disagreed on; announcements are there
};

}  // namespace deep_ep::abi
