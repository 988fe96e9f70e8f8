#include "core/call_message.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/check.hpp"

namespace deep_ep {

namespace {

struct Term {
  const char* name;
  std::int64_t CallTerms::*value;
};
constexpr Term kTerms[] = {
    {"operation", &CallTerms::operation},
    {"bytes of a row of x", &CallTerms::row_bytes},
    {"dtype of x", &CallTerms::x_dtype},
    {"num_topk", &CallTerms::num_topk},
    {"scale packs of a token", &CallTerms::num_sf_packs},
    {"num_experts", &CallTerms::num_experts},
    {"num_max_tokens_per_rank", &CallTerms::num_max_tokens_per_rank},
    {"expert_alignment", &CallTerms::expert_alignment},
    {"do_expand", &CallTerms::do_expand},
    {"topk_weights given", &CallTerms::has_weights},
    {"bytes of an id", &CallTerms::idx_bytes},
};

std::string value_text(const Term& term, std::int64_t value) {
  if (term.value == &CallTerms::operation) return name_of(static_cast<Operation>(value));
  if (term.value == &CallTerms::x_dtype) return name_of(static_cast<DType>(value));
  return std::to_string(value);
}

void require_peer(bool condition, int rank_idx, const char* what) {
  if (!condition) {
    throw Error(ErrorCode::kPeer,
                concat("rank ", rank_idx, " sent a message that can't be right: ", what));
  }
}

}  // namespace

const char* name_of(Operation operation) noexcept {
  switch (operation) {
    case Operation::kDispatch:
      return "dispatch";
    case Operation::kCachedDispatch:
      return "cached dispatch";
    case Operation::kCombine:
      return "combine";
    case Operation::kBarrier:
      return "barrier";
    case Operation::kRefused:
      return "refused call";
  }
  return "unknown operation";
}

CallTerms terms_of(const DispatchPlan& plan) {
  return {.operation = static_cast<std::int64_t>(plan.is_cached ? Operation::kCachedDispatch
                                                                : Operation::kDispatch),
          .row_bytes = plan.row_bytes,
          .x_dtype = static_cast<std::int64_t>(plan.x_dtype),
          .num_topk = plan.shape.num_topk,
          .num_sf_packs = plan.num_sf_packs,
          .num_experts = plan.shape.num_experts,
          .num_max_tokens_per_rank = plan.num_max_tokens_per_rank,
          .expert_alignment = plan.shape.expert_alignment,
          .do_expand = plan.shape.do_expand ? 1 : 0,
          .has_weights = plan.has_weights ? 1 : 0,
          .idx_bytes = size_of(plan.idx_dtype)};
}

CallTerms terms_of(const CombinePlan& plan) {
  CallTerms terms;
  terms.operation = static_cast<std::int64_t>(Operation::kCombine);
  terms.row_bytes = plan.row_bytes;
  terms.num_topk = plan.shape.num_topk;
  terms.num_experts = plan.shape.num_experts;
  terms.expert_alignment = plan.shape.expert_alignment;
  terms.do_expand = plan.shape.do_expand ? 1 : 0;
  terms.has_weights = plan.has_weights ? 1 : 0;
  return terms;
}

void write_message(std::span<std::byte> target, const CallHeader& header,
                   std::span<const std::int32_t> counts) {
  internal_check(sizeof(CallHeader) + counts.size_bytes() <= target.size(), "message does not fit");
  std::memcpy(target.data(), &header, sizeof(CallHeader));
  if (!counts.empty()) {
    std::memcpy(target.data() + sizeof(CallHeader), counts.data(), counts.size_bytes());
  }
}

CallHeader read_header(std::span<const std::byte> message, std::uint64_t call, int rank_idx) {
  require_peer(message.size() >= sizeof(CallHeader), rank_idx, "it is too short");
  CallHeader header;
  std::memcpy(&header, message.data(), sizeof(CallHeader));
  require_peer(header.call == call, rank_idx, "it belongs to another call");
  require_peer(header.terms.operation >= static_cast<std::int64_t>(Operation::kDispatch) &&
                   header.terms.operation <= static_cast<std::int64_t>(Operation::kRefused),
               rank_idx, "it names no operation");
  require_peer(header.reason.back() == '\0', rank_idx, "its reason has no end");
  return header;
}

void read_counts(std::span<const std::byte> message, const CallHeader& header,
                 const RoutingShape& shape, int rank_idx, std::span<std::int32_t> row) {
  require_peer(header.num_counts == shape.num_counts(), rank_idx,
               "it has the wrong number of counts");
  require_peer(message.size() >= sizeof(CallHeader) + row.size_bytes(), rank_idx,
               "its counts are cut off");
  std::memcpy(row.data(), message.data() + sizeof(CallHeader), row.size_bytes());
  require_peer(header.num_tokens >= 0 && header.num_tokens <= header.terms.num_max_tokens_per_rank,
               rank_idx, "it has more tokens than num_max_tokens_per_rank");
  const CountRow counts(shape, row);
  for (int rank = 0; rank < shape.num_ranks(); ++rank) {
    const std::int32_t tokens = counts.tokens_to_rank(rank);
    require_peer(tokens >= 0 && tokens <= header.num_tokens, rank_idx,
                 "a token count is out of range");
    require_peer(tokens <= counts.tokens_to_node(shape.node_of(rank)), rank_idx,
                 "a rank gets more tokens than its domain");
  }
  for (int node = 0; node < shape.topology.num_scaleout_ranks; ++node) {
    const std::int32_t tokens = counts.tokens_to_node(node);
    require_peer(tokens >= 0 && tokens <= header.num_tokens, rank_idx,
                 "a domain's token count is out of range");
  }
  const auto num_local = static_cast<std::size_t>(shape.num_local_experts());
  for (int rank = 0; rank < shape.num_ranks(); ++rank) {
    const auto own =
        counts.selections().subspan(static_cast<std::size_t>(rank) * num_local, num_local);
    require_peer(
        std::ranges::all_of(
            own, [&](std::int32_t n) { return n >= 0 && n <= header.num_tokens * shape.num_topk; }),
        rank_idx, "a selection count is out of range");
    const std::int64_t sum = std::accumulate(own.begin(), own.end(), std::int64_t{0});
    const std::int64_t tokens = counts.tokens_to_rank(rank);
    require_peer(sum >= tokens && sum <= tokens * shape.num_topk, rank_idx,
                 "its selections do not fit its tokens");
  }
}

std::optional<CallProblem> find_problem(std::span<const CallHeader> headers) {
  for (std::size_t rank = 0; rank < headers.size(); ++rank) {
    if (headers[rank].terms.operation == static_cast<std::int64_t>(Operation::kRefused)) {
      return CallProblem{
          .is_refusal = true,
          .text = concat("rank ", rank, " refused it: ", headers[rank].reason.data())};
    }
  }
  std::string text;
  for (const Term& term : kTerms) {
    const auto value = [&](const CallHeader& header) { return header.terms.*term.value; };
    if (std::ranges::all_of(headers, [&](const auto& h) { return value(h) == value(headers[0]); }))
      continue;
    text += concat(text.empty() ? "" : "; ", term.name, " must be equal on all ranks, got");
    for (std::size_t rank = 0; rank < headers.size(); ++rank) {
      text +=
          concat(rank == 0 ? " " : ", ", value_text(term, value(headers[rank])), " on rank ", rank);
    }
    if (term.value == &CallTerms::operation) break;  // the other terms then mean nothing
  }
  if (text.empty()) return std::nullopt;
  return CallProblem{.is_refusal = false, .text = text};
}

}  // namespace deep_ep
