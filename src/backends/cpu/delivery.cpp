#include "backends/cpu/delivery.hpp"

#include <algorithm>
#include <cstring>

namespace deep_ep::cpu {

namespace {

// The row of recv_topk_idx for what `lane` sends: local experts of its rank, -1 elsewhere.
template <typename Id>
void write_local_ids(const RoutingShape& shape, std::span<const Lane> lanes, const Lane& lane,
                     std::byte* ids) {
  Id* row = reinterpret_cast<Id*>(ids) + std::int64_t{lane.row} * shape.num_topk;
  for (std::size_t k = 0; k < lanes.size(); ++k) {
    row[k] =
        lanes[k].rank == lane.rank ? lanes[k].expert - lane.rank * shape.num_local_experts() : -1;
  }
}

}  // namespace

Delivery::Delivery(const DispatchPlan& plan, const CallContext& context)
    : plan_(plan), first_rank_(context.ranks.first_of_domain()) {
  for (int rank = first_rank_; rank < context.ranks.last_of_domain(); ++rank) {
    const Window& window = context.ranks.window(rank);
    const Offer offer = window.offer(context.id.number);
    const auto at = [&](std::int64_t offset) { return window.lent_at(offset, 0, rank); };
    targets_.push_back({.x = at(offer.x),
                        .sf = reinterpret_cast<std::int32_t*>(at(offer.sf)),
                        .topk_idx = at(offer.topk_idx),
                        .topk_weights = reinterpret_cast<float*>(at(offer.topk_weights)),
                        .metadata = reinterpret_cast<std::int32_t*>(at(offer.metadata)),
                        .sf_row_stride = offer.sf_row_stride,
                        .sf_column_stride = offer.sf_column_stride});
  }
}

void Delivery::deliver(const TokenBatch& batch, Workers& workers) const {
  const auto num_rows = std::ranges::count_if(batch.routing.lanes, [&](const Lane& lane) {
    return target_of(lane) != nullptr && (plan_.shape.do_expand || lane.is_master);
  });
  const StoreMode mode = store_mode_for(num_rows * plan_.row_bytes);
  workers.parallel_for(batch.routing.num_tokens(), kTokenGrain,
                       [&](std::int64_t begin, std::int64_t end) {
                         for (std::int64_t token = begin; token < end; ++token) {
                           deliver_token(batch, token, mode);
                         }
                         if (mode == StoreMode::kStreaming) finish_streaming();
                       });
}

const Delivery::Target* Delivery::target_of(const Lane& lane) const noexcept {
  const auto place = static_cast<std::size_t>(lane.rank - first_rank_);
  return lane.rank >= first_rank_ && place < targets_.size() ? &targets_[place] : nullptr;
}

void Delivery::deliver_token(const TokenBatch& batch, std::int64_t token, StoreMode mode) const {
  const bool do_expand = plan_.shape.do_expand;
  const auto lanes = batch.routing.token(token);
  for (std::size_t k = 0; k < lanes.size(); ++k) {
    const Lane& lane = lanes[k];
    const Target* target = target_of(lane);
    if (target == nullptr) continue;
    if (do_expand || lane.is_master) {
      copy_row(target->x + lane.row * plan_.row_bytes, batch.x + token * batch.x_stride,
               static_cast<std::size_t>(plan_.row_bytes), mode);
      for (std::int64_t p = 0; p < plan_.num_sf_packs; ++p) {
        target->sf[lane.row * target->sf_row_stride + p * target->sf_column_stride] =
            batch.sf[token * batch.sf_row_stride + p * batch.sf_column_stride];
      }
    }
    if (do_expand && plan_.has_weights) {
      target->topk_weights[lane.row] =
          batch.weights[token * batch.weights_stride + static_cast<std::int64_t>(k)];
    }
    if (lane.is_master) deliver_about(batch, token, k, *target);
  }
}

// What a rank gets once a token, whatever the number of its experts: ids and weights (compact),
// metadata.
void Delivery::deliver_about(const TokenBatch& batch, std::int64_t token, std::size_t lane_idx,
                             const Target& target) const {
  const RoutingShape& shape = plan_.shape;
  const auto lanes = batch.routing.token(token);
  const Lane& lane = lanes[lane_idx];
  if (!shape.do_expand) {
    if (plan_.has_weights) {
      std::memcpy(target.topk_weights + std::int64_t{lane.row} * shape.num_topk,
                  batch.weights + token * batch.weights_stride, 4 * lanes.size());
    }
    if (plan_.idx_dtype == DType::kInt64) {
      write_local_ids<std::int64_t>(shape, lanes, lane, target.topk_idx);
    } else {
      write_local_ids<std::int32_t>(shape, lanes, lane, target.topk_idx);
    }
  }
  if (target.metadata == nullptr) return;  // a cached dispatch has it already
  const std::int64_t token_idx = batch.token_ids == nullptr ? token : batch.token_ids[token];
  std::int32_t* metadata = target.metadata + std::int64_t{lane.token_row} * (shape.num_topk + 2);
  metadata[0] = static_cast<std::int32_t>(batch.source * plan_.num_max_tokens_per_rank + token_idx);
  metadata[1] = batch.source * shape.num_topk + static_cast<int>(lane_idx);
  for (std::size_t k = 0; k < lanes.size(); ++k) {
    metadata[2 + k] = lanes[k].rank == lane.rank ? lanes[k].row : -1;
  }
}

}  // namespace deep_ep::cpu
