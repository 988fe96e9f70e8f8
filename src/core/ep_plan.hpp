#pragma once
// Every check of dispatch and combine in one place, and the shapes that follow from the arguments.
#include <cstdint>

#include "core/ep_routing.hpp"
#include "deep_ep/ep_buffer.hpp"

namespace deep_ep {

inline constexpr int kMaxRanks = 1024;
inline constexpr int kMaxTopk = 32;
inline constexpr int kMaxExperts = 16384;
inline constexpr std::int64_t kAllocationAlignment = std::int64_t{2} << 20;  ///< of num_bytes

/// A dispatch whose arguments hold together on this rank.
struct DispatchPlan {
  RoutingShape shape;
  std::int64_t num_tokens = 0;               ///< T
  std::int64_t num_max_tokens_per_rank = 0;  ///< M
  std::int64_t row_bytes = 0;
  std::int64_t hidden = 0;
  DType x_dtype = DType::kBFloat16;
  std::int64_t num_sf_packs = 0;  ///< P, 0 without scales
  DType sf_dtype = DType::kFloat32;
  DType idx_dtype = DType::kInt64;
  bool has_weights = false;
  bool is_cached = false;
  bool has_exact_counts = true;
  int num_sms = 0;  ///< as given, rounded up to even, or the estimate
};

/// Checks `args` and fills in what they leave open. Throws kInvalidArgument.
DispatchPlan plan_dispatch(const DispatchArgs& args, const EPBufferOptions& options,
                           const Topology& logical);

/// A combine whose arguments hold together on this rank.
struct CombinePlan {
  RoutingShape shape;
  std::int64_t num_tokens = 0;  ///< T of the dispatch
  std::int64_t num_rows = 0;    ///< rows of x
  std::int64_t hidden = 0;
  std::int64_t row_bytes = 0;
  bool has_weights = false;
  int num_sms = 0;  ///< as given, rounded up to even, or the handle's
};
CombinePlan plan_combine(const CombineArgs& args, const EPBufferOptions& options,
                         const Topology& logical);

/// Throws kInvalidArgument unless these options can make a buffer; returns them with num_bytes set.
EPBufferOptions check_options(const EPBufferOptions& options, const Topology& logical);

}  // namespace deep_ep
