#include "core/ep_plan.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <ostream>

#include "base/check.hpp"

namespace deep_ep {

namespace {

/// A tensor's shape and dtype in a message; becomes text only if the message is needed.
struct ShapeText {
  const TensorView& view;
  friend std::ostream& operator<<(std::ostream& out, const ShapeText& text) {
    const auto& [tensor] = text;
    if (!tensor.is_given()) return out << "none";
    out << "[" << tensor.shape[0];
    if (tensor.num_dims == 2) out << ", " << tensor.shape[1];
    return out << "] " << name_of(tensor.dtype);
  }
};

/// The name of a device in a message.
struct DeviceText {
  int cuda_device;
  friend std::ostream& operator<<(std::ostream& out, const DeviceText& text) {
    return text.cuda_device == kHostMemory ? out << "the CPU" : out << "cuda:" << text.cuda_device;
  }
};

void require_device(const TensorView& view, int cuda_device) {
  require(!view.is_given() || view.cuda_device == cuda_device || view.num_elements() == 0,
          "tensors must lie on ", DeviceText{cuda_device}, " as the buffer does, got one on ",
          DeviceText{view.cuda_device});
}

void require_matrix(const char* name, const TensorView& view, std::int64_t rows,
                    std::int64_t columns, DType dtype) {
  require(view.num_dims == 2 && view.shape[0] == rows && view.shape[1] == columns &&
              view.dtype == dtype,
          name, " must be [", rows, ", ", columns, "] ", name_of(dtype), ", got ", ShapeText{view});
  require(view.is_contiguous(), name, " must be contiguous, got strides (", view.strides[0], ", ",
          view.strides[1], ") for shape ", ShapeText{view});
}

void require_vector(const char* name, const TensorView& view, std::int64_t size, DType dtype) {
  require(view.num_dims == 1 && view.shape[0] == size && view.dtype == dtype, name, " must be [",
          size, "] ", name_of(dtype), ", got ", ShapeText{view});
  require(view.is_contiguous(), name, " must be contiguous, got stride ", view.strides[0]);
}

int even_sms(int num_sms) {
  require(num_sms > 0, "num_sms must not be negative (0: automatic), got ", num_sms);
  return num_sms + num_sms % 2;
}

void check_x(const DispatchArgs& args, DispatchPlan& plan) {
  const TensorView& x = args.x;
  require(x.num_dims == 2 && (x.dtype == DType::kBFloat16 || x.dtype == DType::kFloat8E4M3 ||
                              x.dtype == DType::kUInt8),
          "x must be [num_tokens, hidden] bfloat16, float8_e4m3fn or uint8, got ", ShapeText{x});
  require(x.is_contiguous(), "x must be contiguous, got strides (", x.strides[0], ", ",
          x.strides[1], ") for shape ", ShapeText{x});
  plan.num_tokens = x.shape[0];
  plan.hidden = x.shape[1];
  plan.x_dtype = x.dtype;
  plan.row_bytes = plan.hidden * size_of(x.dtype);
  require(plan.row_bytes > 0 && plan.row_bytes % 2 == 0,
          "a row of x must have a positive, even number of bytes, got ", plan.row_bytes,
          " for shape ", ShapeText{x});
  if (!args.x_sf.is_given()) return;
  const TensorView& sf = args.x_sf;
  require(x.dtype != DType::kBFloat16,
          "scale factors go with float8_e4m3fn (or uint8) data, got x ", ShapeText{x});
  require(sf.num_dims == 2 && sf.shape[0] == plan.num_tokens && sf.shape[1] > 0 &&
              (sf.dtype == DType::kFloat32 || sf.dtype == DType::kInt32),
          "scale factors must be [", plan.num_tokens, ", packs] float32 or int32, got ",
          ShapeText{sf});
  plan.num_sf_packs = sf.shape[1];
  plan.sf_dtype = sf.dtype;
}

// Ids are in this rank's memory, so a look at each is cheap beside moving the rows.
void check_ids(const DispatchArgs& args, const DispatchPlan& plan) {
  const RoutingShape& shape = plan.shape;
  const TopkIds ids(args.topk_idx);
  const int most_lanes = std::min(shape.num_topk, shape.num_local_experts());
  for (std::int64_t token = 0; token < plan.num_tokens; ++token) {
    for (int lane = 0; lane < shape.num_topk; ++lane) {
      const std::int64_t expert = ids.at(token, lane);
      if (expert >= shape.num_experts) [[unlikely]] {
        require(false, "topk_idx must be below num_experts ", shape.num_experts, ", got ", expert,
                " for token ", token, ", lane ", lane);
      }
    }
    if (plan.has_exact_counts || !shape.do_expand || most_lanes == shape.num_topk) continue;
    // The worst case of rows holds only without the same expert twice: count lanes of each rank.
    for (int lane = 0; lane < shape.num_topk; ++lane) {
      const std::int64_t expert = ids.at(token, lane);
      if (expert < 0) continue;
      int on_rank = 0;
      for (int other = 0; other < shape.num_topk; ++other) {
        const std::int64_t id = ids.at(token, other);
        on_rank += id >= 0 && shape.rank_of(id) == shape.rank_of(expert) ? 1 : 0;
      }
      require(on_rank <= most_lanes, "expanded dispatch without CPU sync has room for ", most_lanes,
              " lanes of a token on one rank, got ", on_rank, " on rank ", shape.rank_of(expert),
              " for token ", token, "; an expert repeated in a row needs do_cpu_sync");
    }
  }
}

void check_routing(const DispatchArgs& args, const EPBufferOptions& options,
                   const Topology& logical, DispatchPlan& plan) {
  RoutingShape& shape = plan.shape;
  const TensorView& ids = args.topk_idx;
  shape.topology = logical;
  require(ids.num_dims == 2 && (ids.dtype == DType::kInt64 || ids.dtype == DType::kInt32),
          "topk_idx must be [num_tokens, num_topk] int64 or int32, got ", ShapeText{ids});
  require(ids.shape[0] == plan.num_tokens, "topk_idx must have a row for each of the ",
          plan.num_tokens, " tokens of x, got ", ShapeText{ids});
  require(ids.is_contiguous(), "topk_idx must be contiguous, got strides (", ids.strides[0], ", ",
          ids.strides[1], ")");
  require(ids.shape[1] >= 1 && ids.shape[1] <= kMaxTopk, "num_topk must be 1 to ", kMaxTopk,
          ", got ", ids.shape[1]);
  shape.num_topk = static_cast<int>(ids.shape[1]);
  plan.idx_dtype = ids.dtype;

  const int num_ranks = logical.num_ranks;
  shape.num_experts = args.num_experts;
  require(args.num_experts > 0 && args.num_experts <= kMaxExperts, "num_experts must be 1 to ",
          kMaxExperts, ", got ", args.num_experts);
  require(args.num_experts % num_ranks == 0, "num_experts must be a multiple of the ", num_ranks,
          " ranks of the group, got ", args.num_experts, "; the nearest that fits is ",
          std::max<std::int64_t>(1, (args.num_experts + num_ranks / 2) / num_ranks) * num_ranks);
  shape.expert_alignment = args.expert_alignment == 0 ? 1 : args.expert_alignment;
  require(shape.expert_alignment >= 1, "expert_alignment must be at least 1, got ",
          args.expert_alignment);
  shape.do_expand = args.do_expand;
  plan.num_max_tokens_per_rank = args.num_max_tokens_per_rank != 0
                                     ? args.num_max_tokens_per_rank
                                     : options.num_max_tokens_per_rank;
  plan.has_exact_counts = args.do_cpu_sync;
  plan.num_sms = args.num_sms != 0 ? even_sms(args.num_sms)
                                   : theoretical_num_sms({.physical = logical,
                                                          .logical = logical,
                                                          .num_experts = shape.num_experts,
                                                          .num_topk = shape.num_topk});
}

void take_routing(const DispatchArgs& args, const Topology& logical, DispatchPlan& plan) {
  const EPHandle& handle = *args.handle;
  RoutingShape& shape = plan.shape;
  shape = {.topology = logical,
           .num_experts = handle.num_experts,
           .num_topk = handle.num_topk,
           .expert_alignment = handle.expert_alignment,
           .do_expand = handle.do_expand};
  require(!args.topk_idx.is_given(), "topk_idx comes from the handle: pass one of both, not both");
  require(args.num_experts == 0 || args.num_experts == handle.num_experts,
          "num_experts must be the handle's ", handle.num_experts, ", got ", args.num_experts);
  require(args.num_max_tokens_per_rank == 0 ||
              args.num_max_tokens_per_rank == handle.num_max_tokens_per_rank,
          "num_max_tokens_per_rank must be the handle's ", handle.num_max_tokens_per_rank, ", got ",
          args.num_max_tokens_per_rank);
  require(args.expert_alignment == 0 || args.expert_alignment == handle.expert_alignment,
          "expert_alignment must be the handle's ", handle.expert_alignment, ", got ",
          args.expert_alignment);
  require(args.do_expand == handle.do_expand, "do_expand must be the handle's ", handle.do_expand,
          ", got ", args.do_expand);
  require(plan.num_tokens == handle.num_tokens, "x must have the ", handle.num_tokens,
          " tokens of the handle's dispatch, got ", plan.num_tokens);
  require(
      !args.cumulative_local_expert_recv_stats.is_given(),
      "cumulative_local_expert_recv_stats does not go with a handle: its dispatch counted already");
  plan.num_max_tokens_per_rank = handle.num_max_tokens_per_rank;
  plan.idx_dtype = handle.idx_dtype;
  plan.has_exact_counts = handle.has_exact_counts;
  plan.num_sms = args.num_sms == 0 ? handle.num_sms : even_sms(args.num_sms);
}

void check_handle(const EPHandle* handle, const Topology& logical) {
  require(handle != nullptr, "a handle of dispatch must be given");
  require(handle->topology.num_ranks == logical.num_ranks &&
              handle->topology.rank_idx == logical.rank_idx &&
              handle->topology.num_scaleup_ranks == logical.num_scaleup_ranks,
          "the handle must come from a buffer over the same ranks: its group had ",
          handle->topology.num_ranks, " ranks in domains of ", handle->topology.num_scaleup_ranks,
          " and this was rank ", handle->topology.rank_idx, ", here ", logical.num_ranks, ", ",
          logical.num_scaleup_ranks, " and ", logical.rank_idx);
}

}  // namespace

DispatchPlan plan_dispatch(const DispatchArgs& args, const EPBufferOptions& options,
                           const Topology& logical) {
  for (const TensorView* view : {&args.x, &args.x_sf, &args.topk_idx, &args.topk_weights,
                                 &args.cumulative_local_expert_recv_stats}) {
    require_device(*view, options.cuda_device);
  }
  DispatchPlan plan;
  plan.is_cached = args.handle != nullptr;
  if (plan.is_cached) check_handle(args.handle.get(), logical);
  check_x(args, plan);
  if (plan.is_cached) {
    take_routing(args, logical, plan);
  } else {
    check_routing(args, options, logical, plan);
  }
  const std::int64_t capacity = plan.num_max_tokens_per_rank;
  require(capacity > 0, "num_max_tokens_per_rank must be given to the buffer or to the call, got ",
          capacity);
  require(plan.num_tokens <= capacity, "x has ", plan.num_tokens,
          " tokens, more than num_max_tokens_per_rank ", capacity, " on rank ", logical.rank_idx,
          ": raise it on all ranks");
  require(capacity * logical.num_ranks <= std::numeric_limits<std::int32_t>::max(),
          "num_max_tokens_per_rank * num_ranks must fit 31 bits, got ", capacity, " * ",
          logical.num_ranks);
  require(!args.do_zero_padding || plan.shape.do_expand, "do_zero_padding goes with do_expand");
  if (args.topk_weights.is_given()) {
    plan.has_weights = true;
    require_matrix("topk_weights", args.topk_weights, plan.num_tokens, plan.shape.num_topk,
                   DType::kFloat32);
  }
  if (args.cumulative_local_expert_recv_stats.is_given()) {
    require_vector("cumulative_local_expert_recv_stats", args.cumulative_local_expert_recv_stats,
                   plan.shape.num_local_experts(), DType::kInt32);
  }
  require(worst_case_rows(plan.shape, capacity) <= std::numeric_limits<std::int32_t>::max(),
          "expanded rows must fit 31 bits, got a worst case of ",
          worst_case_rows(plan.shape, capacity));
  // What lies on a GPU, its kernels check.
  if (!plan.is_cached && options.cuda_device == kHostMemory) check_ids(args, plan);
  return plan;
}

CombinePlan plan_combine(const CombineArgs& args, const EPBufferOptions& options,
                         const Topology& logical) {
  for (const TensorView* view : {&args.x, &args.topk_weights, &args.bias[0], &args.bias[1]}) {
    require_device(*view, options.cuda_device);
  }
  check_handle(args.handle.get(), logical);
  const EPHandle& handle = *args.handle;
  CombinePlan plan;
  plan.shape = {.topology = logical,
                .num_experts = handle.num_experts,
                .num_topk = handle.num_topk,
                .expert_alignment = handle.expert_alignment,
                .do_expand = handle.do_expand};
  plan.num_tokens = handle.num_tokens;
  plan.num_rows = args.x.shape[0];
  plan.hidden = args.x.shape[1];
  plan.row_bytes = plan.hidden * size_of(DType::kBFloat16);
  require(args.x.num_dims == 2 && args.x.dtype == DType::kBFloat16 && plan.hidden > 0,
          "x must be [rows, hidden] bfloat16, got ", ShapeText{args.x});
  require(args.x.is_contiguous(), "x must be contiguous, got strides (", args.x.strides[0], ", ",
          args.x.strides[1], ") for shape ", ShapeText{args.x});
  const std::int64_t num_rows =
      handle.do_expand ? handle.num_expanded_tokens : handle.num_recv_tokens;
  require(handle.do_expand ? plan.num_rows >= num_rows : plan.num_rows == num_rows, "x must have ",
          handle.do_expand ? "at least " : "", "the ", num_rows,
          " rows that dispatch returned, got ", plan.num_rows);
  if (args.topk_weights.is_given()) {
    plan.has_weights = true;
    if (handle.do_expand) {
      require_vector("topk_weights", args.topk_weights, plan.num_rows, DType::kFloat32);
    } else {
      require_matrix("topk_weights", args.topk_weights, plan.num_rows, plan.shape.num_topk,
                     DType::kFloat32);
    }
  }
  for (const TensorView& bias : args.bias) {
    if (bias.is_given())
      require_matrix("bias", bias, plan.num_tokens, plan.hidden, DType::kBFloat16);
  }
  require(!args.defer_epilogue || args.is_async, "defer_epilogue goes with an asynchronous call");
  plan.num_sms = args.num_sms == 0 ? handle.num_sms : even_sms(args.num_sms);
  return plan;
}

EPBufferOptions check_options(const EPBufferOptions& options, const Topology& logical) {
  require(logical.num_ranks <= kMaxRanks, "a group must have at most ", kMaxRanks, " ranks, got ",
          logical.num_ranks);
  require(options.num_bytes >= 0 && options.num_bytes % kAllocationAlignment == 0,
          "num_bytes must be a positive multiple of ", kAllocationAlignment, " (2 MiB), got ",
          options.num_bytes);
  require(options.num_max_tokens_per_rank >= 0 && options.hidden >= 0,
          "num_max_tokens_per_rank and hidden must not be negative, got ",
          options.num_max_tokens_per_rank, " and ", options.hidden);
  require(options.num_topk >= 0 && options.num_topk <= kMaxTopk, "num_topk must be 0 to ", kMaxTopk,
          ", got ", options.num_topk);
  require(options.timeout_secs > 0, "the time limit must be positive, got ", options.timeout_secs,
          " s");
  EPBufferOptions checked = options;
  if (checked.num_bytes == 0) {
    require(options.num_max_tokens_per_rank > 0 && options.hidden > 0,
            "without num_bytes, num_max_tokens_per_rank and hidden must be positive, got ",
            options.num_max_tokens_per_rank, " and ", options.hidden);
    checked.num_bytes =
        EPBuffer::size_hint(logical, options.num_max_tokens_per_rank, options.hidden,
                            options.num_topk, options.use_fp8_dispatch,
                            options.allow_multiple_reduction)
            .num_bytes;
  }
  return checked;
}

}  // namespace deep_ep
