#pragma once
// The regions of a rank's window in device memory, and the words in them. Host and kernels agree on
// these bytes.
#include <cstdint>

namespace deep_ep::abi {

/// How far a rank is with a call. Every rank keeps a word for it in the window of every other rank,
/// which holds `call * kStagesPerCall + stage` and only grows.
enum class Stage : std::uint64_t {
  kAnnounced = 1,  ///< its announcement can be read, and its counts if the call has some
  kOffered = 2,    ///< its offer can be read
  kDone = 4,       ///< it has written all that it had to write here, and read all that it had to
};
inline constexpr std::uint64_t kStagesPerCall = 8;

constexpr std::uint64_t stage_word(std::uint64_t call, Stage stage) noexcept {
  return call * kStagesPerCall + static_cast<std::uint64_t>(stage);
}

/// What one peer writes and this rank polls; alone in its line.
struct alignas(64) StageWord {
  std::uint64_t value;
  std::uint64_t is_gone;  ///< 1: the peer makes no more calls; what it did before still counts
};

/// Why a rank can't make a call, found by itself.
enum class Refusal : std::int32_t {
  kNone = 0,
  kReason = 1,        ///< its host says why in `reason`
  kIdTooLarge = 2,    ///< topk_idx holds `bad_value`, which is no expert
  kTooManyLanes = 3,  ///< `bad_value` lanes of a token on one rank: more than rows were lent for
};

inline constexpr int kNumTerms = 12;

/// What a rank tells every other rank about a call before any row moves.
struct alignas(16) Announcement {
  std::int64_t terms[kNumTerms];  ///< must be equal on all ranks
  std::int64_t num_tokens;        ///< of the sender
  Refusal refusal;
  std::int32_t bad_lane;
  std::int64_t bad_token;
  std::int64_t bad_value;
  char reason[376];  ///< null-terminated
};
static_assert(sizeof(Announcement) == 512);

/// Where a rank's memory for one call lies in its own window: byte offsets, -1 for what is not
/// there.
struct alignas(16) Offer {
  std::int64_t x;             ///< dispatch: rows arrive here; combine: rows are read here
  std::int64_t sf;            ///< scale packs
  std::int64_t topk_idx;
  std::int64_t topk_weights;
  std::int64_t metadata;
  std::int64_t sf_row_stride;     ///< in packs
  std::int64_t sf_column_stride;  ///< in packs
  std::int64_t unused;
};
static_assert(sizeof(Offer) == 64);

/// Words that only this rank's kernels touch.
struct Control {
  std::uint64_t num_calls;  ///< calls that are over; kernels of the next one read it first
  std::uint64_t problem;    ///< the last call that all ranks gave up because they disagreed
  std::uint32_t fault;      ///< 1: a wait ran out, no kernel does anything any more
  std::uint32_t num_arrived;   ///< blocks that have published
  std::uint32_t num_finished;  ///< blocks that are through with the call
  std::uint32_t num_met;       ///< blocks at the grid barrier
  std::int64_t bad_value;      ///< of topk_idx, see Announcement; valid if `refusal` is set
  std::int64_t bad_token;
  std::int32_t bad_lane;
  std::uint32_t refusal;  ///< a Refusal, found by a block
};

/// Byte offsets of the regions. Calls alternate between two slots: a rank enters call n + 2 only
/// after its peers have read all of call n.
struct WindowLayout {
  std::int64_t control;
  std::int64_t stages;         ///< StageWord by source rank
  std::int64_t announcements;  ///< by slot, by source rank
  std::int64_t offers;         ///< by slot, by source rank
  std::int64_t counts;         ///< int32 by slot, by source rank, `counts_stride` bytes apart
  std::int64_t counts_stride;
  std::int64_t arena;  ///< where lent memory begins
};

constexpr std::int64_t align_up(std::int64_t value, std::int64_t alignment) noexcept {
  return (value + alignment - 1) / alignment * alignment;
}

constexpr WindowLayout make_window_layout(int num_ranks, int num_max_experts) noexcept {
  WindowLayout layout{};
  std::int64_t end = 0;
  const auto place = [&end](std::int64_t num_bytes) {
    const std::int64_t offset = end;
    end = align_up(end + num_bytes, 512);
    return offset;
  };
  layout.control = place(static_cast<std::int64_t>(sizeof(Control)));
  layout.stages = place(num_ranks * static_cast<std::int64_t>(sizeof(StageWord)));
  layout.announcements = place(2 * num_ranks * static_cast<std::int64_t>(sizeof(Announcement)));
  layout.offers = place(2 * num_ranks * static_cast<std::int64_t>(sizeof(Offer)));
  layout.counts_stride = align_up(4 * (std::int64_t{num_ranks} + num_max_experts), 128);
  layout.counts = place(2 * num_ranks * layout.counts_stride);
  layout.arena = end;
  return layout;
}

}  // namespace deep_ep::abi
