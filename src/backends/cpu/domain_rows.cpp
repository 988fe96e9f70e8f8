#include "backends/cpu/domain_rows.hpp"

namespace deep_ep::cpu {

DomainRows::DomainRows(const CombinePlan& plan, bool rounds_per_rank, const CallContext& context,
                       std::span<const CallHeader> headers)
    : plan_(plan),
      rounds_per_rank_(rounds_per_rank),
      first_rank_(context.ranks.first_of_domain()),
      last_rank_(context.ranks.last_of_domain()) {
  for (int rank = first_rank_; rank < last_rank_; ++rank) {
    const CallHeader& header = headers[static_cast<std::size_t>(rank)];
    const Window& window = context.ranks.window(rank);
    x_.push_back(reinterpret_cast<const std::uint16_t*>(window.lent_at(header.x_offset, 0, rank)));
    weights_.push_back(
        reinterpret_cast<const float*>(window.lent_at(header.weights_offset, 0, rank)));
  }
}

float DomainRows::weight_of(const Lane& lane, std::size_t lane_idx) const noexcept {
  const float* weights = weights_[place(lane)];
  if (plan_.shape.do_expand) return weights[lane.row];
  return weights[std::int64_t{lane.row} * plan_.shape.num_topk +
                 static_cast<std::int64_t>(lane_idx)];
}

void DomainRows::append(std::span<const Lane> lanes, Terms& terms) const noexcept {
  const bool takes_every_lane = plan_.shape.do_expand;
  for (std::size_t k = 0; k < lanes.size(); ++k) {
    if (!has(lanes[k])) continue;
    if (takes_every_lane && !rounds_per_rank_) {
      terms.add_row(row_of(lanes[k]));
      continue;
    }
    if (!lanes[k].is_master) continue;
    bool is_first = true;
    for (std::size_t j = takes_every_lane ? 0 : k; j <= k; ++j) {
      if (lanes[j].rank != lanes[k].rank) continue;
      if (is_first) {
        terms.add_row(row_of(lanes[j]));
      } else {
        terms.extend_group(row_of(lanes[j]));
      }
      is_first = false;
    }
  }
}

}  // namespace deep_ep::cpu
