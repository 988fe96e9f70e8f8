#pragma once
// The bytes of one token on its way between domains: the one place where sender and forwarder
// agree.
#include <cstdint>

#include "core/ep_plan.hpp"

namespace deep_ep {

/// Byte offsets of a token's fields, and the size of a slot. The row comes first.
struct TokenSlot {
  std::int64_t sf = 0;       ///< P packs
  std::int64_t ids = 0;      ///< K int32
  std::int64_t weights = 0;  ///< K float32
  std::int64_t token = 0;    ///< int32: index on the source
  std::int64_t num_bytes = 0;

  constexpr TokenSlot(std::int64_t row_bytes, std::int64_t num_sf_packs, std::int64_t num_topk) {
    std::int64_t end = align_up(row_bytes, 64);
    const auto place = [&end](std::int64_t bytes) {
      const std::int64_t offset = end;
      end += bytes;
      return offset;
    };
    sf = place(4 * num_sf_packs);
    ids = place(4 * num_topk);
    weights = place(4 * num_topk);
    token = place(4);
    num_bytes = align_up(end, 64);
  }
  /// Everything but the row, in one piece.
  constexpr std::int64_t tail() const noexcept { return sf; }
  constexpr std::int64_t tail_bytes() const noexcept { return num_bytes - sf; }
};

}  // namespace deep_ep
