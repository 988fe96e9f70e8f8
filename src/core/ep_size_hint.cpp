// EPBuffer::size_hint: the most memory that the calls of one shape keep at a time.
#include <algorithm>

#include "base/check.hpp"
#include "core/ep_plan.hpp"

namespace deep_ep {

BufferSizeHint EPBuffer::size_hint(const Topology& logical, int num_max_tokens_per_rank, int hidden,
                                   int num_topk, bool use_fp8_dispatch,
                                   bool allow_multiple_reduction) {
  require(num_max_tokens_per_rank > 0 && hidden > 0,
          "num_max_tokens_per_rank and hidden must be positive, got ", num_max_tokens_per_rank,
          " and ", hidden);
  require(num_topk >= 0 && num_topk <= kMaxTopk, "num_topk must be 0 to ", kMaxTopk, ", got ",
          num_topk);
  const std::int64_t topk = num_topk == 0 ? kMaxTopk : num_topk;
  const std::int64_t tokens = num_max_tokens_per_rank;
  const std::int64_t recv_tokens = tokens * logical.num_ranks;
  // Expanded rows may be more; a balanced gate gives each rank num_topk a token.
  const std::int64_t recv_rows = std::max(recv_tokens, tokens * topk);
  const std::int64_t other_nodes = logical.num_scaleout_ranks - 1;
  const std::int64_t bf16_row = 2 * std::int64_t{hidden};

  // A received row: data and scales (4 bytes for 32 elements at most). A token: ids, weights,
  // metadata.
  const std::int64_t payload =
      use_fp8_dispatch ? hidden + 4 * ((std::int64_t{hidden} + 31) / 32) : bf16_row;
  const std::int64_t token_bytes = topk * (8 + 4) + (topk + 2) * 4;

  // What a token sends back between domains: a sum a domain, or each of its rows.
  const std::int64_t rows_between =
      allow_multiple_reduction ? 1 : std::min<std::int64_t>(logical.num_scaleup_ranks, topk);
  constexpr std::int64_t kRounding = 64 << 10;  // blocks start on pages; at most 16 at a time

  BufferSizeHint hint;
  hint.lent_bytes =
      recv_rows * payload + recv_tokens * token_bytes + tokens * (bf16_row + 4 * topk) + kRounding;
  hint.staging_bytes = std::max(other_nodes * tokens * (payload + topk * 12 + 256),
                                recv_rows * bf16_row + recv_tokens * 4 * topk +
                                    other_nodes * tokens * (rows_between * bf16_row + 4 * topk));
  hint.num_bytes = align_up(hint.lent_bytes + hint.staging_bytes, kAllocationAlignment);
  return hint;
}

}  // namespace deep_ep
