#include "backends/cpu/ep_combine.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/check.hpp"

namespace deep_ep::cpu {

namespace {

constexpr std::int64_t kCopyGrain = std::int64_t{256} << 10;  // bytes

// No lane of [k + 1, end) has the property that lane k has, so k is the highest of its group.
template <typename Same>
bool is_last(std::span<const Lane> lanes, std::size_t k, const Same& same) {
  return std::none_of(lanes.begin() + static_cast<std::ptrdiff_t>(k) + 1, lanes.end(),
                      [&](const Lane& lane) { return lane.rank >= 0 && same(lane); });
}

}  // namespace

Combine::Combine(const CombineArgs& args, const CombinePlan& plan, bool allow_multiple_reduction,
                 Arena& arena)
    : args_(args), plan_(plan), rounds_on_the_way_(allow_multiple_reduction) {
  outputs_.combined_x = arena.lend_matrix(plan.num_tokens, plan.hidden, DType::kBFloat16);
  if (plan.has_weights) {
    outputs_.combined_topk_weights =
        arena.lend_matrix(plan.num_tokens, plan.shape.num_topk, DType::kFloat32);
  }
  const bool has_bias = args.bias[0].is_given() || args.bias[1].is_given();
  keeps_terms_ = args.defer_epilogue && has_bias;
}

void Combine::prepare() {
  args_.previous_event.wait();
  routing_ = routing_of(*args_.handle);
}

void Combine::run(CallContext& context) {
  CallHeader header;
  header.terms = terms_of(plan_);
  stage_inputs(context, header);
  const std::vector<CallHeader> headers =
      exchange(context.ranks, context.network, context.id, header, {}, nullptr);
  domain_rows_.emplace(plan_, rounds_on_the_way_, context, headers);
  if (plan_.shape.topology.is_hybrid()) {
    land_from_other_domains(context);
    context.ranks.wait_for_network(context.id, NetworkSignal::kOffered);
    reduce_for_other_domains(context);
    context.ranks.wait_for_network(context.id, NetworkSignal::kDelivered);
  }
  sum(context);
  landings_.clear();
  context.ranks.post_stage(context.id,
                           Stage::kDone);  // release: this rank reads no peer's rows any more
  context.ranks.wait_for_stage(context.id,
                               Stage::kDone);  // acquire: no peer reads this rank's rows any more
  staged_.clear();
}

// Announces where x lies in this window. What lies elsewhere is copied there: the rows that were
// received.
void Combine::stage_inputs(CallContext& context, CallHeader& header) {
  const ReceiveCounts& received = routing_->received;
  const std::int64_t num_rows = !plan_.shape.do_expand
                                    ? received.num_tokens
                                    : received.expert_starts.back() + received.expert_counts.back();
  const auto stage = [&](const TensorView& view, std::int64_t num_bytes) {
    const std::int64_t offset = context.arena.offset_of(view.data, num_bytes);
    if (offset >= 0 || num_bytes == 0) return offset;
    staged_.push_back(context.arena.lend(num_bytes));
    auto* target = static_cast<std::byte*>(staged_.back().get());
    const StoreMode mode = store_mode_for(num_bytes);
    context.workers.parallel_for(num_bytes, kCopyGrain, [&](auto begin, auto end) {
      copy_row(target + begin, view.as<std::byte>() + begin, static_cast<std::size_t>(end - begin),
               mode);
      if (mode == StoreMode::kStreaming) finish_streaming();
    });
    return context.arena.offset_of(target, num_bytes);
  };
  header.x_offset = stage(args_.x, num_rows * plan_.row_bytes);
  if (plan_.has_weights) {
    const std::int64_t values_per_row = plan_.shape.do_expand ? 1 : plan_.shape.num_topk;
    header.weights_offset = stage(args_.topk_weights, num_rows * values_per_row * 4);
  }
}

// Rows that a token sends back from a domain at most: their sum, or each of them.
std::int64_t Combine::landing_rows() const noexcept {
  if (rounds_on_the_way_) return 1;
  const std::int64_t topk = plan_.shape.num_topk;
  return plan_.shape.do_expand
             ? topk
             : std::min<std::int64_t>(topk, plan_.shape.topology.num_scaleup_ranks);
}

std::int64_t Combine::landing_slot_bytes() const noexcept {
  return align_up(landing_rows() * plan_.row_bytes, 64) + align_up(4 * plan_.shape.num_topk, 64);
}

const std::byte* Combine::landed(std::int64_t token, int node) const {
  const auto* landing =
      static_cast<const std::byte*>(landings_[static_cast<std::size_t>(node)].get());
  return landing + routing_->slot(token, node) * landing_slot_bytes();
}

void Combine::land_from_other_domains(CallContext& context) {
  const Topology& topology = plan_.shape.topology;
  landings_.resize(static_cast<std::size_t>(topology.num_scaleout_ranks));
  for (int node = 0; node < topology.num_scaleout_ranks; ++node) {
    if (node == topology.scaleout_rank_idx()) continue;
    const std::int64_t num_bytes =
        routing_->num_to_node[static_cast<std::size_t>(node)] * landing_slot_bytes();
    std::shared_ptr<void>& landing = landings_[static_cast<std::size_t>(node)];
    landing = context.arena.lend(num_bytes);
    offer_landing(context, node,
                  landing == nullptr ? -1 : context.arena.offset_of(landing.get(), num_bytes));
  }
}

void Combine::reduce_for_other_domains(CallContext& context) {
  const Topology& topology = plan_.shape.topology;
  for (int node = 0; node < topology.num_scaleout_ranks; ++node) {
    if (node == topology.scaleout_rank_idx()) continue;
    const ForwardedTokens& tokens = routing_->forwarded[static_cast<std::size_t>(node)];
    const std::int64_t landing = landing_at(context, node);
    const int peer = rail_peer(topology, node);
    context.workers.parallel_for(
        tokens.routing.num_tokens(), kTokenGrain, [&](auto begin, auto end) {
          std::vector<std::uint16_t> scratch(static_cast<std::size_t>(plan_.hidden));
          for (std::int64_t token = begin; token < end; ++token) {
            reduce_token(context, tokens, token, landing + token * landing_slot_bytes(), peer,
                         scratch.data());
          }
        });
    context.network.signal(peer, NetworkSignal::kDelivered, context.id.number);
  }
}

// Sends what this domain's ranks hold for a token of another domain: the sum, or row after row.
void Combine::reduce_token(const CallContext& context, const ForwardedTokens& tokens,
                           std::int64_t token, std::int64_t target_offset, int peer,
                           std::uint16_t* scratch) const {
  const auto lanes = tokens.routing.token(token);
  Terms terms;
  domain_rows_->append(lanes, terms);
  if (rounds_on_the_way_) {
    sum_rows(scratch, terms.sum(), static_cast<std::size_t>(plan_.hidden), StoreMode::kCached);
    context.network.put(peer, target_offset, scratch, plan_.row_bytes);
  } else {
    std::int64_t offset = target_offset;
    for (const std::uint16_t* row : terms.rows()) {
      context.network.put(peer, offset, row, plan_.row_bytes);
      offset += plan_.row_bytes;
    }
  }
  if (!plan_.has_weights) return;
  std::array<float, kMaxTopk> weights{};
  for (std::size_t k = 0; k < lanes.size(); ++k)
    weights[k] = lanes[k].rank < 0 ? 0.0F : domain_rows_->weight_of(lanes[k], k);
  context.network.put(peer, target_offset + align_up(landing_rows() * plan_.row_bytes, 64),
                      weights.data(), static_cast<std::int64_t>(4 * lanes.size()));
}

// All rows of one of this rank's tokens. With several domains: `scratch` takes the sum of the own
// one.
void Combine::add_terms(std::int64_t token, std::uint16_t* scratch, Terms& terms) const {
  const auto lanes = routing_->own.token(token);
  const RoutingShape& shape = plan_.shape;
  if (!shape.topology.is_hybrid()) {
    domain_rows_->append(lanes, terms);
    return;
  }
  std::array<std::int64_t, kMaxTopk> next_row{};  // of each domain, by the lane that saw it first
  for (std::size_t k = 0; k < lanes.size(); ++k) {
    const Lane& lane = lanes[k];
    if (lane.rank < 0) continue;
    const int node = shape.node_of(lane.rank);
    if (rounds_on_the_way_) {
      if (!is_last(lanes, k, [&](const Lane& other) { return shape.node_of(other.rank) == node; }))
        continue;
      if (domain_rows_->has(lane)) {
        Terms own;
        domain_rows_->append(lanes, own);
        sum_rows(scratch, own.sum(), static_cast<std::size_t>(plan_.hidden), StoreMode::kCached);
        terms.add_row(scratch);
      } else {
        terms.add_row(reinterpret_cast<const std::uint16_t*>(landed(token, node)));
      }
    } else if (shape.do_expand || lane.is_master) {
      if (domain_rows_->has(lane)) {
        terms.add_row(domain_rows_->row_of(lane));
        continue;
      }
      const auto first = std::ranges::find_if(lanes, [&](const Lane& other) {
        return other.rank >= 0 && shape.node_of(other.rank) == node;
      });
      const std::int64_t row = next_row[static_cast<std::size_t>(first - lanes.begin())]++;
      terms.add_row(reinterpret_cast<const std::uint16_t*>(landed(token, node)) +
                    row * plan_.hidden);
    }
  }
}

void Combine::add_bias(std::int64_t token, Terms& terms) const {
  for (const TensorView& bias : args_.bias) {
    if (bias.is_given()) terms.add_row(bias.as<const std::uint16_t>() + token * plan_.hidden);
  }
}

void Combine::collect_weights(std::int64_t token) const {
  const auto lanes = routing_->own.token(token);
  float* target = outputs_.combined_topk_weights.as<float>() + token * plan_.shape.num_topk;
  for (std::size_t k = 0; k < lanes.size(); ++k) {
    const Lane& lane = lanes[k];
    if (lane.rank < 0) {
      target[k] = 0.0F;
    } else if (domain_rows_->has(lane)) {
      target[k] = domain_rows_->weight_of(lane, k);
    } else {
      const std::byte* slot = landed(token, plan_.shape.node_of(lane.rank));
      std::memcpy(&target[k], slot + align_up(landing_rows() * plan_.row_bytes, 64) + 4 * k, 4);
    }
  }
}

void Combine::sum(CallContext& context) {
  if (keeps_terms_) terms_.resize(static_cast<std::size_t>(plan_.num_tokens));
  const auto hidden = static_cast<std::size_t>(plan_.hidden);
  const StoreMode mode = store_mode_for(plan_.num_tokens * plan_.row_bytes);
  auto* out = outputs_.combined_x.as<std::uint16_t>();
  context.workers.parallel_for(plan_.num_tokens, kTokenGrain, [&](auto begin, auto end) {
    std::vector<std::uint16_t> scratch(plan_.shape.topology.is_hybrid() ? hidden : 0);
    for (std::int64_t token = begin; token < end; ++token) {
      Terms terms;
      if (!keeps_terms_) add_bias(token, terms);
      add_terms(token, scratch.data(), terms);
      if (keeps_terms_) {
        keep_terms(token, terms);
      } else {
        sum_rows(out + token * plan_.hidden, terms.sum(), hidden, mode);
      }
      if (plan_.has_weights) collect_weights(token);
    }
    if (mode == StoreMode::kStreaming) finish_streaming();
  });
}

// Copies the rows of a token for the epilogue, each group already summed and rounded. A row alone
// is not rounded: it keeps its bits.
void Combine::keep_terms(std::int64_t token, const Terms& terms) {
  const auto hidden = static_cast<std::size_t>(plan_.hidden);
  std::vector<std::uint16_t>& kept = terms_[static_cast<std::size_t>(token)];
  kept.resize(terms.group_sizes().size() * hidden);
  std::uint16_t* target = kept.data();
  auto rows = terms.rows();
  for (const std::uint8_t size : terms.group_sizes()) {
    if (size == 1) {
      std::memcpy(target, rows[0], 2 * hidden);
    } else {
      Terms group;
      for (const std::uint16_t* row : rows.first(size)) group.add_row(row);
      sum_rows(target, group.sum(), hidden, StoreMode::kCached);
    }
    rows = rows.subspan(size);
    target += hidden;
  }
}

void Combine::run_epilogue() {
  const auto hidden = static_cast<std::size_t>(plan_.hidden);
  auto* out = outputs_.combined_x.as<std::uint16_t>();
  for (std::int64_t token = 0; keeps_terms_ && token < plan_.num_tokens; ++token) {
    Terms terms;
    add_bias(token, terms);
    const std::vector<std::uint16_t>& kept = terms_[static_cast<std::size_t>(token)];
    for (std::size_t first = 0; first < kept.size(); first += hidden)
      terms.add_row(kept.data() + first);
    sum_rows(out + token * plan_.hidden, terms.sum(), hidden, StoreMode::kCached);
  }
  terms_.clear();
  args_.keep_alive = nullptr;
}

void Combine::finish(std::exception_ptr error) {
  if (!args_.defer_epilogue) args_.keep_alive = nullptr;
  done_->set_done(std::move(error));
}

CombineOutputs Combine::outputs(void* /*stream*/) {
  if (args_.defer_epilogue) {
    done_->wait();
    std::call_once(epilogue_once_, [this] { run_epilogue(); });
  }
  return outputs_;
}

}  // namespace deep_ep::cpu
