#pragma once
// Puts tokens into the outputs of the ranks of this domain: every row once, to its final place.
#include <cstdint>
#include <span>
#include <vector>

#include "backends/cpu/ep_call.hpp"
#include "backends/cpu/rows.hpp"
#include "core/ep_plan.hpp"

namespace deep_ep::cpu {

/// Tokens of one source: where their data lies in memory of this rank, and where they go.
struct TokenBatch {
  int source = -1;
  const Routing& routing;
  const std::int32_t* token_ids = nullptr;  ///< index on the source; null: 0, 1, 2, …
  const std::byte* x = nullptr;
  std::int64_t x_stride = 0;  ///< bytes
  const std::int32_t* sf = nullptr;
  std::int64_t sf_row_stride = 0, sf_column_stride = 0;  ///< packs
  const float* weights = nullptr;
  std::int64_t weights_stride = 0;  ///< values
};

class Delivery {
 public:
  /// Reads the offers of all ranks of the domain, which must have been made (Stage::kOffered).
  /// Throws kPeer if one does not lie in the window of its rank.
  Delivery(const DispatchPlan& plan, const CallContext& context);

  /// Writes all rows of the batch that go to this domain; they are visible to who sees a later
  /// post().
  void deliver(const TokenBatch& batch, Workers& workers) const;

 private:
  // Where the output of a rank lies, null for what it does not want.
  struct Target {
    std::byte* x = nullptr;
    std::int32_t* sf = nullptr;
    std::byte* topk_idx = nullptr;
    float* topk_weights = nullptr;
    std::int32_t* metadata = nullptr;
    std::int64_t sf_row_stride = 0, sf_column_stride = 0;
  };
  const Target* target_of(const Lane& lane) const noexcept;
  void deliver_token(const TokenBatch& batch, std::int64_t token, StoreMode mode) const;
  void deliver_about(const TokenBatch& batch, std::int64_t token, std::size_t lane_idx,
                     const Target& target) const;

  const DispatchPlan& plan_;
  const int first_rank_;
  std::vector<Target> targets_;  // one a rank of the domain
};

}  // namespace deep_ep::cpu
