#pragma once
// The regions of a rank's window. Every rank computes the same from the topology.
#include <array>
#include <cstdint>

#include "backends/cpu/signal.hpp"
#include "core/call_message.hpp"

namespace deep_ep::cpu {

/// How far a rank is with a call. Its phase signal holds `call * kStagesPerCall + stage`.
enum class Stage : std::uint64_t {
  kAnnounced = 1,  ///< its message can be read (combine: and its x)
  kRelayed = 2,    ///< the messages that came to it from other domains can be read
  kOffered = 3,    ///< its offer of output memory can be read
  kDone = 4,       ///< it has written all that it had to write, and read all that it had to read
};
inline constexpr std::uint64_t kStagesPerCall = 8;
constexpr std::uint64_t phase_value(std::uint64_t call, Stage stage) noexcept {
  return call * kStagesPerCall + static_cast<std::uint64_t>(stage);
}

/// Where the rows of one dispatch go: offsets into the window of the receiver, -1 for what is not
/// wanted.
struct Offer {
  std::int64_t x = -1, sf = -1, topk_idx = -1, topk_weights = -1, metadata = -1;
  std::int64_t sf_row_stride = 0, sf_column_stride = 0;  ///< in packs
};

/// Words that a rank of another domain sets in this window: values are call numbers.
enum class NetworkSignal { kAnnounced, kOffered, kDelivered };
inline constexpr int kNumNetworkSignals = 3;

/// What the owner of a window says about itself, read by the ranks of its domain.
struct Control {
  Signal phase;
  alignas(64) std::uint32_t is_gone = 0;  ///< 1: the owner makes no more calls; the rest says why
  std::uint32_t farewell_code = 0;        ///< an ErrorCode
  std::array<char, 512> farewell = {};
};

/// What a rank of another domain writes here. Calls alternate between the two slots: a rank enters
/// call n + 2 only after its peers have read all of call n (see docs/protocol.md).
struct Inbox {
  std::array<Signal, kNumNetworkSignals> signals;
  alignas(64) std::array<std::int64_t, 2> landing_offset = {};
};

/// Byte offsets in a window.
struct WindowLayout {
  std::int64_t message_bytes = 0;
  std::int64_t control = 0;
  std::int64_t messages = 0;        ///< own, 2 slots
  std::int64_t offers = 0;          ///< own, 2 slots
  std::int64_t inboxes = 0;         ///< one a domain
  std::int64_t inbox_messages = 0;  ///< 2 slots a domain
  std::int64_t arena = 0;

  explicit WindowLayout(const Topology& logical)
      : message_bytes(max_message_bytes(logical.num_ranks)) {
    std::int64_t end = 0;
    const auto place = [&end](std::int64_t bytes) {
      const std::int64_t offset = end;
      end = align_up(offset + bytes, 128);
      return offset;
    };
    control = place(sizeof(Control));
    messages = place(2 * message_bytes);
    offers = place(2 * static_cast<std::int64_t>(sizeof(Offer)));
    inboxes = place(logical.num_scaleout_ranks * static_cast<std::int64_t>(sizeof(Inbox)));
    inbox_messages = place(logical.num_scaleout_ranks * 2 * message_bytes);
    arena = align_up(end, kAllocationAlignment);
  }

  static std::int64_t slot(std::uint64_t call) noexcept {
    return static_cast<std::int64_t>(call % 2);
  }
  std::int64_t message(std::uint64_t call) const noexcept {
    return messages + slot(call) * message_bytes;
  }
  std::int64_t offer(std::uint64_t call) const noexcept {
    return offers + slot(call) * static_cast<std::int64_t>(sizeof(Offer));
  }
  std::int64_t inbox(int node) const noexcept {
    return inboxes + node * static_cast<std::int64_t>(sizeof(Inbox));
  }
  std::int64_t inbox_message(int node, std::uint64_t call) const noexcept {
    return inbox_messages + (2 * node + slot(call)) * message_bytes;
  }
};

}  // namespace deep_ep::cpu
