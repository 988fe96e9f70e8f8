#include "core/ep_reference.hpp"

#include <algorithm>
#include <cstring>
#include <map>

#include "base/check.hpp"
#include "core/float_formats.hpp"

namespace deep_ep::reference {
namespace {

std::size_t at(std::int64_t idx) { return static_cast<std::size_t>(idx); }

std::int32_t narrow(std::int64_t value) { return static_cast<std::int32_t>(value); }

std::int64_t align_up(std::int64_t value, std::int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

template <typename T>
void require_size(const std::vector<T>& data, std::int64_t expected, const char* name,
                  int rank_idx) {
  require(data.size() == at(expected), name, " of rank ", rank_idx, " must have ", expected,
          " elements, got ", data.size());
}

void check_options(const RoutingOptions& options, std::size_t num_inputs) {
  const Topology& topology = options.topology;
  require(topology.num_ranks > 0 &&
              topology.num_ranks == topology.num_scaleout_ranks * topology.num_scaleup_ranks,
          "num_ranks must be num_scaleout_ranks * num_scaleup_ranks and positive");
  require(num_inputs == at(topology.num_ranks), "topk_idx must be given for ", topology.num_ranks,
          " ranks, got ", num_inputs);
  require(options.num_experts > 0 && options.num_experts % topology.num_ranks == 0,
          "num_experts must be a positive multiple of num_ranks, got ", options.num_experts);
  require(options.num_topk > 0, "num_topk must be positive");
  require(options.expert_alignment > 0, "expert_alignment must be positive");
}

/// Numbers the rows of a compact output; writes the rows to the senders' compact_dst_rows.
void place_compact_rows(Routing& routing, int dst_rank_idx) {
  RankRouting& dst = routing.ranks[at(dst_rank_idx)];
  const int num_topk = routing.options.num_topk;
  for (int src_rank_idx = 0; src_rank_idx < routing.options.topology.num_ranks; ++src_rank_idx) {
    RankRouting& src = routing.ranks[at(src_rank_idx)];
    for (std::int64_t token_idx = 0; token_idx < src.num_tokens; ++token_idx) {
      const std::int64_t row = std::ssize(dst.compact_rows);
      bool is_received = false;
      for (int lane_idx = 0; lane_idx < num_topk; ++lane_idx) {
        const std::size_t lane = at(token_idx * num_topk + lane_idx);
        if (routing.rank_of(src.topk_idx[lane]) != dst_rank_idx) continue;
        src.compact_dst_rows[lane] = narrow(row);
        is_received = true;
      }
      if (is_received) dst.compact_rows.push_back({src_rank_idx, token_idx, -1});
    }
  }
}

/// Numbers the rows of an expanded output; writes counts, ends and the senders' expanded_dst_rows.
void place_expanded_rows(Routing& routing, int dst_rank_idx) {
  RankRouting& dst = routing.ranks[at(dst_rank_idx)];
  const int num_topk = routing.options.num_topk, num_local = routing.num_experts_per_rank();
  std::int64_t aligned_psum = 0;
  for (int expert_idx = dst_rank_idx * num_local; expert_idx < (dst_rank_idx + 1) * num_local;
       ++expert_idx) {
    std::int64_t num_rows = 0;
    for (const RowSource& received : dst.compact_rows) {
      RankRouting& src = routing.ranks[at(received.rank_idx)];
      for (int lane_idx = 0; lane_idx < num_topk; ++lane_idx) {
        const std::size_t lane = at(received.token_idx * num_topk + lane_idx);
        if (src.topk_idx[lane] != expert_idx) continue;
        src.expanded_dst_rows[lane] = narrow(std::ssize(dst.expanded_rows));
        dst.expanded_rows.push_back({received.rank_idx, received.token_idx, lane_idx});
        ++num_rows;
      }
    }
    dst.num_unaligned_recv_tokens_per_expert.push_back(narrow(num_rows));
    dst.expanded_psum_num_recv_tokens_per_expert.push_back(narrow(std::ssize(dst.expanded_rows)));
    const std::int64_t num_aligned = align_up(num_rows, routing.options.expert_alignment);
    dst.num_recv_tokens_per_expert.push_back(num_aligned);
    aligned_psum += num_aligned;
    dst.compact_psum_num_recv_tokens_per_expert.push_back(narrow(aligned_psum));
    dst.expanded_rows.resize(at(aligned_psum));  // padding
  }
}

/// Writes what the receiver is told about each of its rows.
void describe_rows(Routing& routing, int dst_rank_idx) {
  const RoutingOptions& options = routing.options;
  RankRouting& dst = routing.ranks[at(dst_rank_idx)];
  const std::int64_t first_expert_idx = std::int64_t{dst_rank_idx} * routing.num_experts_per_rank();
  std::vector<std::int32_t> num_tokens_per_scaleup_rank(at(options.topology.num_scaleup_ranks));
  for (const RowSource& received : dst.compact_rows) {
    const RankRouting& src = routing.ranks[at(received.rank_idx)];
    ++num_tokens_per_scaleup_rank[at(received.rank_idx % options.topology.num_scaleup_ranks)];
    std::vector<std::int32_t> expanded_rows;
    int highest_lane_idx = -1;
    for (int lane_idx = 0; lane_idx < options.num_topk; ++lane_idx) {
      const std::size_t lane = at(received.token_idx * options.num_topk + lane_idx);
      const bool is_here = routing.rank_of(src.topk_idx[lane]) == dst_rank_idx;
      if (is_here) highest_lane_idx = lane_idx;
      dst.recv_topk_idx.push_back(is_here ? src.topk_idx[lane] - first_expert_idx : -1);
      expanded_rows.push_back(is_here ? src.expanded_dst_rows[lane] : -1);
    }
    auto& metadata = dst.recv_src_metadata;
    metadata.push_back(
        narrow(received.rank_idx * options.num_max_tokens_per_rank + received.token_idx));
    metadata.push_back(received.rank_idx * options.num_topk + highest_lane_idx);
    metadata.insert(metadata.end(), expanded_rows.begin(), expanded_rows.end());
  }
  std::int32_t psum = 0;
  for (const std::int32_t count : num_tokens_per_scaleup_rank) {
    dst.psum_num_recv_tokens_per_scaleup_rank.push_back(psum += count);
  }
}

/// A row that takes part in a sum: of one lane, of the lanes on one rank, or of the lanes in one
/// domain.
struct Term {
  int master_lane_idx;  ///< the highest of its lanes
  int rank_idx;
  BF16Row row;
};

/// Adds rows one by one in FP32 from +0, then rounds once.
BF16Row rounded_sum(const std::vector<BF16Row>& rows, std::int64_t hidden) {
  BF16Row result(at(hidden));
  for (std::size_t i = 0; i < result.size(); ++i) {
    float sum = 0.0f;
    for (const BF16Row& row : rows) sum += float_from_bf16(row[i]);
    result[i] = bf16_from_float(sum);
  }
  return result;
}

/// Sums the terms of each group in their order, and orders the sums by master lane. The only term
/// of a group is copied bit by bit.
std::vector<Term> reduce_groups(const std::vector<Term>& terms, int num_ranks_per_group,
                                std::int64_t hidden) {
  std::map<int, std::vector<Term>> groups;
  for (const Term& term : terms) groups[term.rank_idx / num_ranks_per_group].push_back(term);
  std::vector<Term> sums;
  for (const auto& [group_idx, members] : groups) {
    Term sum = members.back();  // terms ascend, so the last has the highest lane
    if (members.size() > 1) {
      std::vector<BF16Row> rows;
      for (const Term& member : members) rows.push_back(member.row);
      sum.row = rounded_sum(rows, hidden);
    }
    sums.push_back(std::move(sum));
  }
  std::ranges::sort(sums, {}, &Term::master_lane_idx);
  return sums;
}

BF16Row row_of(const BF16Row& matrix, std::int64_t row, std::int64_t hidden) {
  const auto begin = matrix.begin() + row * hidden;
  return BF16Row(begin, begin + hidden);
}

/// The reduced row of one token, without bias: what is left to add, in order.
std::vector<Term> terms_of_token(const Routing& routing, const CombineOptions& options,
                                 const std::vector<CombineInput>& inputs, const RankRouting& src,
                                 std::int64_t token_idx) {
  const Topology& topology = routing.options.topology;
  const auto& dst_rows = options.do_expand ? src.expanded_dst_rows : src.compact_dst_rows;
  std::vector<Term> terms;
  for (int lane_idx = 0; lane_idx < routing.options.num_topk; ++lane_idx) {
    const std::size_t lane = at(token_idx * routing.options.num_topk + lane_idx);
    const int rank_idx = routing.rank_of(src.topk_idx[lane]);
    if (rank_idx < 0) continue;
    // A compact row stands for all lanes on its rank: it is the term of the highest.
    if (!options.do_expand) {
      std::erase_if(terms, [&](const Term& term) { return term.rank_idx == rank_idx; });
    }
    terms.push_back(
        {lane_idx, rank_idx, row_of(inputs[at(rank_idx)].x, dst_rows[lane], options.hidden)});
  }
  if (!options.allow_multiple_reduction) return terms;
  if (options.do_expand) terms = reduce_groups(terms, 1, options.hidden);
  if (topology.is_hybrid())
    terms = reduce_groups(terms, topology.num_scaleup_ranks, options.hidden);
  return terms;
}

}  // namespace

int Routing::rank_of(std::int64_t expert_idx) const noexcept {
  const bool is_expert = expert_idx >= 0 && expert_idx < options.num_experts;
  return is_expert ? static_cast<int>(expert_idx / num_experts_per_rank()) : -1;
}

Routing make_routing(const RoutingOptions& options,
                     const std::vector<std::vector<std::int64_t>>& topk_idx) {
  check_options(options, topk_idx.size());
  Routing routing{.options = options, .ranks = {}};
  for (const auto& ids : topk_idx) {
    require(ids.size() % at(options.num_topk) == 0, "topk_idx must have rows of num_topk ids");
    RankRouting rank;
    rank.num_tokens = std::ssize(ids) / options.num_topk;
    require(rank.num_tokens <= options.num_max_tokens_per_rank,
            "num_tokens must be at most num_max_tokens_per_rank, got ", rank.num_tokens, " and ",
            options.num_max_tokens_per_rank);
    rank.topk_idx = ids;
    rank.compact_dst_rows.assign(ids.size(), -1);
    rank.expanded_dst_rows.assign(ids.size(), -1);
    routing.ranks.push_back(std::move(rank));
  }
  for (int rank_idx = 0; rank_idx < options.topology.num_ranks; ++rank_idx) {
    place_compact_rows(routing, rank_idx);
    place_expanded_rows(routing, rank_idx);
    describe_rows(routing, rank_idx);
  }
  return routing;
}

std::vector<DispatchOutput> dispatch(const Routing& routing, const DispatchOptions& options,
                                     const std::vector<DispatchInput>& inputs) {
  const std::int64_t num_topk = routing.options.num_topk, hidden_bytes = options.hidden_bytes;
  require(inputs.size() == routing.ranks.size(), "inputs must be given for all ranks");
  for (int rank_idx = 0; rank_idx < routing.options.topology.num_ranks; ++rank_idx) {
    const DispatchInput& input = inputs[at(rank_idx)];
    const std::int64_t num_tokens = routing.ranks[at(rank_idx)].num_tokens;
    require_size(input.x, num_tokens * hidden_bytes, "x", rank_idx);
    if (options.has_topk_weights) {
      require_size(input.topk_weights, num_tokens * num_topk, "topk_weights", rank_idx);
    }
  }
  std::vector<DispatchOutput> outputs;
  for (const RankRouting& dst : routing.ranks) {
    const auto& rows = options.do_expand ? dst.expanded_rows : dst.compact_rows;
    DispatchOutput output;
    output.x.resize(rows.size() * at(hidden_bytes));
    for (std::size_t row = 0; row < rows.size(); ++row) {
      const RowSource& source = rows[row];
      if (source.is_padding()) {
        output.x_sf.insert(output.x_sf.end(), at(options.num_sf_packs), 0);
        if (options.has_topk_weights) output.topk_weights.push_back(0.0f);
        continue;
      }
      const DispatchInput& input = inputs[at(source.rank_idx)];
      std::copy_n(input.x.begin() + source.token_idx * hidden_bytes, hidden_bytes,
                  output.x.begin() + static_cast<std::int64_t>(row) * hidden_bytes);
      for (std::int64_t pack = 0; pack < options.num_sf_packs; ++pack) {
        output.x_sf.push_back(input.x_sf.at(
            at(source.token_idx * input.sf_token_stride + pack * input.sf_pack_stride)));
      }
      if (!options.has_topk_weights) continue;
      const auto weights = input.topk_weights.begin() + source.token_idx * num_topk;
      if (options.do_expand) {
        output.topk_weights.push_back(weights[source.lane_idx]);
      } else {
        output.topk_weights.insert(output.topk_weights.end(), weights, weights + num_topk);
      }
    }
    outputs.push_back(std::move(output));
  }
  return outputs;
}

std::vector<std::uint32_t> to_tma_col_major(const std::vector<std::uint32_t>& row_major,
                                            std::int64_t num_rows, std::int64_t num_packs) {
  const std::int64_t column_stride = align_up(num_rows, 4);
  std::vector<std::uint32_t> columns(at(column_stride * num_packs));
  for (std::int64_t row = 0; row < num_rows; ++row) {
    for (std::int64_t pack = 0; pack < num_packs; ++pack) {
      columns[at(pack * column_stride + row)] = row_major.at(at(row * num_packs + pack));
    }
  }
  return columns;
}

std::vector<CombineOutput> combine(const Routing& routing, const CombineOptions& options,
                                   const std::vector<CombineInput>& inputs) {
  const std::int64_t num_topk = routing.options.num_topk, hidden = options.hidden;
  require(inputs.size() == routing.ranks.size(), "inputs must be given for all ranks");
  for (int rank_idx = 0; rank_idx < routing.options.topology.num_ranks; ++rank_idx) {
    const RankRouting& rank = routing.ranks[at(rank_idx)];
    const CombineInput& input = inputs[at(rank_idx)];
    const std::int64_t num_rows =
        std::ssize(options.do_expand ? rank.expanded_rows : rank.compact_rows);
    require_size(input.x, num_rows * hidden, "x", rank_idx);
    if (options.has_topk_weights) {
      require_size(input.topk_weights, options.do_expand ? num_rows : num_rows * num_topk,
                   "topk_weights", rank_idx);
    }
    for (const BF16Row& bias : input.bias) {
      if (!bias.empty()) require_size(bias, rank.num_tokens * hidden, "bias", rank_idx);
    }
  }
  std::vector<CombineOutput> outputs;
  for (std::size_t rank_idx = 0; rank_idx < routing.ranks.size(); ++rank_idx) {
    const RankRouting& src = routing.ranks[rank_idx];
    CombineOutput output;
    for (std::int64_t token_idx = 0; token_idx < src.num_tokens; ++token_idx) {
      std::vector<BF16Row> rows;
      for (const BF16Row& bias : inputs[rank_idx].bias) {
        if (!bias.empty()) rows.push_back(row_of(bias, token_idx, hidden));
      }
      for (Term& term : terms_of_token(routing, options, inputs, src, token_idx)) {
        rows.push_back(std::move(term.row));
      }
      const BF16Row sum = rounded_sum(rows, hidden);
      output.x.insert(output.x.end(), sum.begin(), sum.end());
    }
    for (std::size_t lane = 0; options.has_topk_weights && lane < src.topk_idx.size(); ++lane) {
      const int dst_rank_idx = routing.rank_of(src.topk_idx[lane]);
      if (dst_rank_idx < 0) {
        output.topk_weights.push_back(0.0f);
        continue;
      }
      const auto& weights = inputs[at(dst_rank_idx)].topk_weights;
      const std::int64_t lane_idx = static_cast<std::int64_t>(lane) % num_topk;
      output.topk_weights.push_back(
          options.do_expand ? weights[at(src.expanded_dst_rows[lane])]
                            : weights[at(src.compact_dst_rows[lane] * num_topk + lane_idx)]);
    }
    outputs.push_back(std::move(output));
  }
  return outputs;
}

}  // namespace deep_ep::reference
