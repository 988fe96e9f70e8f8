#pragma once
// The experts' rows of this domain's ranks, and which of them make up a token.
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "backends/cpu/ep_call.hpp"
#include "backends/cpu/rows.hpp"
#include "core/ep_plan.hpp"

namespace deep_ep::cpu {

/// The rows of one token, as sum_rows() wants them.
class Terms {
 public:
  /// A group of one row.
  void add_row(const std::uint16_t* row) noexcept {
    rows_[num_rows_++] = row;
    group_sizes_[num_groups_++] = 1;
  }
  /// One more row for the group that came last.
  void extend_group(const std::uint16_t* row) noexcept {
    rows_[num_rows_++] = row;
    ++group_sizes_[num_groups_ - 1];
  }
  std::span<const std::uint16_t* const> rows() const noexcept { return {rows_.data(), num_rows_}; }
  std::span<const std::uint8_t> group_sizes() const noexcept {
    return {group_sizes_.data(), num_groups_};
  }
  RowSum sum() const noexcept { return {.rows = rows(), .group_sizes = group_sizes()}; }

 private:
  std::array<const std::uint16_t*, kMaxTopk + 2> rows_;  // lanes, and two biases
  std::array<std::uint8_t, kMaxTopk + 2> group_sizes_;
  std::size_t num_rows_ = 0, num_groups_ = 0;
};

class DomainRows {
 public:
  /// `rounds_per_rank`: the rows of one rank (expanded input) are summed and rounded first.
  DomainRows(const CombinePlan& plan, bool rounds_per_rank, const CallContext& context,
             std::span<const CallHeader> headers);

  bool has(const Lane& lane) const noexcept {
    return lane.rank >= first_rank_ && lane.rank < last_rank_;
  }
  const std::uint16_t* row_of(const Lane& lane) const noexcept {
    return x_[place(lane)] + lane.row * plan_.hidden;
  }
  float weight_of(const Lane& lane, std::size_t lane_idx) const noexcept;

  /// Appends the rows that this domain holds for a token: ranks in the order of their highest lane,
  /// the rows of a rank as one group; or, without rounding, the rows of an expanded input lane by
  /// lane.
  void append(std::span<const Lane> lanes, Terms& terms) const noexcept;

 private:
  std::size_t place(const Lane& lane) const noexcept {
    return static_cast<std::size_t>(lane.rank - first_rank_);
  }

  const CombinePlan& plan_;
  const bool rounds_per_rank_;
  const int first_rank_, last_rank_;
  std::vector<const std::uint16_t*> x_;  // one a rank of the domain
  std::vector<const float*> weights_;    // likewise
};

}  // namespace deep_ep::cpu
