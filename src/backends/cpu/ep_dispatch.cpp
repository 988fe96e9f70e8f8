#include "backends/cpu/ep_dispatch.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "backends/cpu/new_handle.hpp"
#include "backends/ep_outputs.hpp"
#include "core/token_slot.hpp"

namespace deep_ep::cpu {

Dispatch::Dispatch(const DispatchArgs& args, const DispatchPlan& plan, Arena& arena)
    : args_(args), plan_(plan) {
  const RoutingShape& shape = plan.shape;
  if (plan.is_cached) {
    outputs_.handle = args.handle;
    lend_outputs(arena,
                 shape.do_expand ? args.handle->num_expanded_tokens : args.handle->num_recv_tokens,
                 args.handle->num_recv_tokens);
    tell_shapes();
    return;
  }
  new_handle_ = make_handle(plan);
  outputs_.handle = new_handle_;
  if (!plan.has_exact_counts) {
    lend_outputs(arena, worst_case_rows(shape, plan.num_max_tokens_per_rank),
                 new_handle_->num_recv_tokens);
    tell_shapes();
  }
}

void Dispatch::lend_outputs(Arena& arena, std::int64_t num_rows, std::int64_t num_recv_tokens) {
  lend_received(arena, args_, plan_, num_rows, outputs_);
  if (new_handle_ != nullptr) {
    new_handle_->recv_src_metadata =
        arena.lend_matrix(num_recv_tokens, plan_.shape.num_topk + 2, DType::kInt32);
  }
}

void Dispatch::tell_shapes() {
  are_shapes_known_ = true;
  shapes_known_->set_done(nullptr);
}

void Dispatch::prepare() {
  args_.previous_event.wait();
  if (plan_.is_cached) routing_ = routing_of(*args_.handle);
}

void Dispatch::run(CallContext& context) {
  CountMatrix counts(plan_.shape);
  CallHeader header;
  header.terms = terms_of(plan_);
  header.num_tokens = plan_.num_tokens;
  if (plan_.is_cached) {
    exchange(context.ranks, context.network, context.id, header, {}, nullptr);
  } else {
    std::vector<std::int32_t> own(static_cast<std::size_t>(plan_.shape.num_counts()));
    count_selections(plan_.shape, TopkIds(args_.topk_idx), plan_.num_tokens, own);
    exchange(context.ranks, context.network, context.id, header, own, &counts);
    place(context, counts);
  }
  if (args_.do_zero_padding) clear_padding();
  offer(context);
  send_to_other_domains(context);
  context.ranks.wait_for_stage(context.id, Stage::kOffered);
  const Delivery delivery(plan_, context);
  delivery.deliver(own_tokens(), context.workers);
  if (plan_.shape.topology.is_hybrid()) {
    context.ranks.wait_for_network(context.id, NetworkSignal::kDelivered);
    for (int node = 0; node < plan_.shape.topology.num_scaleout_ranks; ++node) {
      if (node == plan_.shape.topology.scaleout_rank_idx()) continue;
      if (!plan_.is_cached) place_landed(context, counts, node);
      delivery.deliver(landed_tokens(node), context.workers);
    }
    landings_.clear();
  }
  context.ranks.post_stage(context.id,
                           Stage::kDone);  // release: pairs with the peers' wait for kDone
  context.ranks.wait_for_stage(context.id,
                               Stage::kDone);  // acquire: all rows of this rank are there
  if (args_.cumulative_local_expert_recv_stats.is_given()) {
    auto* stats = args_.cumulative_local_expert_recv_stats.as<std::int32_t>();
    for (const std::int64_t num_tokens : routing_->received.expert_counts) {
      *stats++ += static_cast<std::int32_t>(num_tokens);
    }
  }
}

void Dispatch::place(CallContext& context, const CountMatrix& counts) {
  const RoutingShape& shape = plan_.shape;
  const Topology& topology = shape.topology;
  new_routing_ = std::make_shared<EPRouting>();
  EPRouting& routing = *new_routing_;
  routing.shape = shape;
  routing.received = receive_counts(counts, topology.rank_idx);
  routing.own = place_tokens(counts, topology.rank_idx, TopkIds(args_.topk_idx), plan_.num_tokens,
                             0, shape.num_ranks());
  if (topology.is_hybrid()) {
    const auto num_nodes = static_cast<std::size_t>(topology.num_scaleout_ranks);
    routing.forwarded.resize(num_nodes);
    routing.num_to_node.assign(num_nodes, 0);
    routing.node_slot.assign(static_cast<std::size_t>(plan_.num_tokens) * num_nodes, -1);
    for (std::int64_t token = 0; token < plan_.num_tokens; ++token) {
      for (const Lane& lane : routing.own.token(token)) {
        if (lane.rank < 0) continue;
        const auto node = static_cast<std::size_t>(shape.node_of(lane.rank));
        std::int32_t& slot = routing.node_slot[static_cast<std::size_t>(token) * num_nodes + node];
        if (slot < 0) slot = static_cast<std::int32_t>(routing.num_to_node[node]++);
      }
    }
    for (int node = 0; node < topology.num_scaleout_ranks; ++node) {
      ForwardedTokens& tokens = routing.forwarded[static_cast<std::size_t>(node)];
      tokens.source = rail_peer(topology, node);
      if (node == topology.scaleout_rank_idx()) continue;
      tokens.token_ids.resize(static_cast<std::size_t>(
          counts.row(tokens.source).tokens_to_node(topology.scaleout_rank_idx())));
    }
  }
  routing_ = new_routing_;
  fill_handle(*new_handle_, plan_, routing_);
  if (are_shapes_known_) return;
  lend_outputs(context.arena,
               shape.do_expand ? routing.received.num_aligned_rows : routing.received.num_tokens,
               routing.received.num_tokens);
  tell_shapes();
}

void Dispatch::clear_padding() const {
  const ReceiveCounts& received = routing_->received;
  for (std::size_t e = 0; e < received.expert_counts.size(); ++e) {
    const std::int64_t first = received.expert_starts[e] + received.expert_counts[e];
    const std::int64_t last = received.expert_starts[e] +
                              align_up(received.expert_counts[e], plan_.shape.expert_alignment);
    if (first == last) continue;
    const auto num_rows = static_cast<std::size_t>(last - first);
    std::memset(outputs_.recv_x.as<std::byte>() + first * plan_.row_bytes, 0,
                num_rows * static_cast<std::size_t>(plan_.row_bytes));
    if (plan_.has_weights)
      std::fill_n(outputs_.recv_topk_weights.as<float>() + first, num_rows, 0.0F);
    const TensorView& sf = outputs_.recv_x_sf.view;
    for (std::int64_t row = first; sf.is_given() && row < last; ++row) {
      for (std::int64_t p = 0; p < plan_.num_sf_packs; ++p) {
        sf.as<std::int32_t>()[row * sf.strides[0] + p * sf.strides[1]] = 0;
      }
    }
  }
}

void Dispatch::offer(CallContext& context) {
  const Arena& arena = context.arena;
  const auto offset = [&arena](const Tensor& tensor) {
    return tensor.view.num_elements() == 0 ? -1 : arena.offset_of(tensor.view.data, 1);
  };
  Offer& offer = context.ranks.own()->offer(context.id.number);
  offer = {.x = offset(outputs_.recv_x),
           .sf = offset(outputs_.recv_x_sf),
           .topk_idx = offset(outputs_.recv_topk_idx),
           .topk_weights = offset(outputs_.recv_topk_weights),
           .metadata = new_handle_ ? offset(new_handle_->recv_src_metadata) : -1,
           .sf_row_stride = outputs_.recv_x_sf.view.strides[0],
           .sf_column_stride = outputs_.recv_x_sf.view.strides[1]};
  context.ranks.post_stage(context.id, Stage::kOffered);  // release: the offer, and cleared padding

  const Topology& topology = plan_.shape.topology;
  const TokenSlot slot(plan_.row_bytes, plan_.num_sf_packs, plan_.shape.num_topk);
  landings_.resize(static_cast<std::size_t>(topology.num_scaleout_ranks));
  for (int node = 0; node < topology.num_scaleout_ranks; ++node) {
    if (node == topology.scaleout_rank_idx()) continue;
    const ForwardedTokens& tokens = routing_->forwarded[static_cast<std::size_t>(node)];
    const auto num_bytes = static_cast<std::int64_t>(tokens.token_ids.size()) * slot.num_bytes;
    std::shared_ptr<void>& landing = landings_[static_cast<std::size_t>(node)];
    landing = context.arena.lend(num_bytes);
    offer_landing(context, node,
                  landing == nullptr ? -1 : arena.offset_of(landing.get(), num_bytes));
  }
}

void Dispatch::send_to_other_domains(CallContext& context) const {
  const Topology& topology = plan_.shape.topology;
  if (!topology.is_hybrid()) return;
  context.ranks.wait_for_network(context.id, NetworkSignal::kOffered);
  const TokenSlot slot(plan_.row_bytes, plan_.num_sf_packs, plan_.shape.num_topk);
  context.workers.parallel_for(plan_.num_tokens, kTokenGrain, [&](auto begin, auto end) {
    std::vector<std::byte> tail(static_cast<std::size_t>(slot.tail_bytes()));
    const auto field = [&](std::int64_t offset) { return tail.data() + (offset - slot.tail()); };
    for (std::int64_t token = begin; token < end; ++token) {
      auto* sf = reinterpret_cast<std::int32_t*>(field(slot.sf));
      for (std::int64_t p = 0; p < plan_.num_sf_packs; ++p) {
        sf[p] = args_.x_sf
                    .as<std::int32_t>()[token * args_.x_sf.strides[0] + p * args_.x_sf.strides[1]];
      }
      const auto lanes = routing_->own.token(token);
      for (std::size_t k = 0; k < lanes.size(); ++k) {
        reinterpret_cast<std::int32_t*>(field(slot.ids))[k] = lanes[k].expert;
      }
      if (plan_.has_weights) {
        std::memcpy(field(slot.weights),
                    args_.topk_weights.as<float>() + token * plan_.shape.num_topk,
                    4 * lanes.size());
      }
      *reinterpret_cast<std::int32_t*>(field(slot.token)) = static_cast<std::int32_t>(token);
      for (int node = 0; node < topology.num_scaleout_ranks; ++node) {
        const std::int32_t place = routing_->slot(token, node);
        if (node == topology.scaleout_rank_idx() || place < 0) continue;
        const int peer = rail_peer(topology, node);
        const std::int64_t offset = landing_at(context, node) + place * slot.num_bytes;
        context.network.put(peer, offset, args_.x.as<std::byte>() + token * plan_.row_bytes,
                            plan_.row_bytes);
        context.network.put(peer, offset + slot.tail(), tail.data(), slot.tail_bytes());
      }
    }
  });
  for (int node = 0; node < topology.num_scaleout_ranks; ++node) {
    if (node == topology.scaleout_rank_idx()) continue;
    context.network.signal(rail_peer(topology, node), NetworkSignal::kDelivered, context.id.number);
  }
}

TokenBatch Dispatch::own_tokens() const {
  return {.source = plan_.shape.topology.rank_idx,
          .routing = routing_->own,
          .x = args_.x.as<std::byte>(),
          .x_stride = plan_.row_bytes,
          .sf = args_.x_sf.as<std::int32_t>(),
          .sf_row_stride = args_.x_sf.strides[0],
          .sf_column_stride = args_.x_sf.strides[1],
          .weights = args_.topk_weights.as<float>(),
          .weights_stride = plan_.shape.num_topk};
}

// Reads what the other domain said about its tokens, and places them.
void Dispatch::place_landed(CallContext& context, const CountMatrix& counts, int node) {
  const TokenSlot slot(plan_.row_bytes, plan_.num_sf_packs, plan_.shape.num_topk);
  ForwardedTokens& tokens = new_routing_->forwarded[static_cast<std::size_t>(node)];
  const auto num_topk = static_cast<std::size_t>(plan_.shape.num_topk);
  const auto* token =
      static_cast<const std::byte*>(landings_[static_cast<std::size_t>(node)].get());
  std::vector<std::int32_t> ids(tokens.token_ids.size() * num_topk);
  for (std::size_t i = 0; i < tokens.token_ids.size(); ++i, token += slot.num_bytes) {
    std::memcpy(&ids[i * num_topk], token + slot.ids, 4 * num_topk);
    std::memcpy(&tokens.token_ids[i], token + slot.token, 4);
  }
  const TensorView view =
      TensorView::matrix(ids.data(), DType::kInt32,
                         static_cast<std::int64_t>(tokens.token_ids.size()), plan_.shape.num_topk);
  tokens.routing = place_tokens(counts, tokens.source, TopkIds(view), view.shape[0],
                                context.ranks.first_of_domain(), context.ranks.last_of_domain());
}

TokenBatch Dispatch::landed_tokens(int node) const {
  const TokenSlot slot(plan_.row_bytes, plan_.num_sf_packs, plan_.shape.num_topk);
  const ForwardedTokens& tokens = routing_->forwarded[static_cast<std::size_t>(node)];
  const auto* landing =
      static_cast<const std::byte*>(landings_[static_cast<std::size_t>(node)].get());
  if (landing == nullptr) return {.source = tokens.source, .routing = tokens.routing};  // no tokens
  return {.source = tokens.source,
          .routing = tokens.routing,
          .token_ids = tokens.token_ids.data(),
          .x = landing,
          .x_stride = slot.num_bytes,
          .sf = reinterpret_cast<const std::int32_t*>(landing + slot.sf),
          .sf_row_stride = slot.num_bytes / 4,
          .sf_column_stride = 1,
          .weights = reinterpret_cast<const float*>(landing + slot.weights),
          .weights_stride = slot.num_bytes / 4};
}

void Dispatch::finish(std::exception_ptr error) {
  args_.keep_alive = nullptr;
  if (!are_shapes_known_) shapes_known_->set_done(error);
  done_->set_done(std::move(error));
}

DispatchOutputs Dispatch::outputs() {
  shapes_known_->wait();
  return outputs_;
}

}  // namespace deep_ep::cpu
