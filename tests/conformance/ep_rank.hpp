#pragma once
// One rank of a problem: makes the calls and compares all that they return with the reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "conformance/ep_problem.hpp"
#include "core/ep_reference.hpp"
#include "deep_ep/ep_buffer.hpp"
#include "support/device_memory.hpp"
#include "support/expect_rows.hpp"

namespace deep_ep::testing {

/// How a dispatch is called.
struct DispatchMode {
  bool do_expand = false, do_cpu_sync = true, is_async = false;
  bool do_zero_padding = false, use_tma_aligned_col_major_sf = false;
  bool has_topk_weights = true;
  int num_sms = 0;

  std::string name() const {
    std::string text = do_expand ? "expanded" : "compact";
    if (!do_cpu_sync) text += ", no CPU sync";
    if (is_async) text += ", async";
    if (do_zero_padding) text += ", zero padding";
    if (use_tma_aligned_col_major_sf) text += ", column-major scales";
    if (!has_topk_weights) text += ", no weights";
    return text + ", num_sms " + std::to_string(num_sms);
  }
};

/// How a combine is called.
struct CombineMode {
  bool is_lent = false;  ///< x lies in memory of EPBuffer::empty
  bool is_async = false, defer_epilogue = false, has_topk_weights = true;
  int num_sms = 0;

  std::string name() const {
    std::string text = is_lent ? "lent x" : "own x";
    if (is_async) text += ", async";
    if (defer_epilogue) text += ", deferred";
    if (!has_topk_weights) text += ", no weights";
    return text + ", num_sms " + std::to_string(num_sms);
  }
};

/// The data of all ranks for one combine, and what must come out.
struct CombineCase {
  CombineCase(const Problem& problem, std::uint64_t seed, std::int64_t hidden, bool do_expand,
              int num_biases, bool allow_multiple_reduction)
      : options{.hidden = hidden,
                .has_topk_weights = true,
                .do_expand = do_expand,
                .allow_multiple_reduction = allow_multiple_reduction},
        inputs(problem.make_combine_inputs(seed, hidden, do_expand, num_biases)),
        expected(reference::combine(problem.routing, options, inputs)) {}

  reference::CombineOptions options;
  std::vector<reference::CombineInput> inputs;
  std::vector<reference::CombineOutput> expected;
};

/// The API takes data that it only reads as void*.
template <typename T>
void* address_of(const std::vector<T>& data) {
  return const_cast<T*>(data.data());
}

class EpRank {
 public:
  EpRank(const Problem& problem, EPBuffer& buffer)
      : problem_(problem),
        buffer_(buffer),
        memory_(buffer.options().cuda_device),
        rank_idx_(buffer.logical_topology().rank_idx),
        routing_(problem.routing.ranks[index()]) {}

  /// Dispatches the problem's data and checks the outputs.
  std::shared_ptr<const EPHandle> dispatch(const DispatchMode& mode) {
    SCOPED_TRACE(mode.name());
    return check(problem_.data, mode, start(problem_.data, mode));
  }

  /// Repeats the routing of `handle` with other data and checks the outputs.
  void dispatch_cached(const std::shared_ptr<const EPHandle>& handle, const DispatchData& data,
                       DispatchMode mode) {
    SCOPED_TRACE("cached, " + mode.name());
    mode.do_cpu_sync = handle->has_exact_counts;
    DispatchArgs args = data_args(data, mode);
    args.handle = handle;
    EXPECT_EQ(check(data, mode, buffer_.dispatch(args)), handle);
  }

  /// Combines and checks the outputs.
  void combine(const std::shared_ptr<const EPHandle>& handle, const CombineCase& combine_case,
               const CombineMode& mode) {
    SCOPED_TRACE(mode.name());
    check(combine_case, mode, start(handle, combine_case, mode));
  }

  PendingDispatch start(const DispatchData& data, const DispatchMode& mode) {
    const ProblemShape& shape = problem_.shape;
    DispatchArgs args = data_args(data, mode);
    const bool is_wide = shape.idx_dtype == DType::kInt64;
    args.topk_idx = memory_.upload(TensorView::matrix(
        is_wide ? address_of(routing_.topk_idx) : address_of(problem_.narrow_topk_idx[index()]),
        shape.idx_dtype, routing_.num_tokens, shape.num_topk));
    args.num_experts = shape.num_experts();
    args.expert_alignment = shape.expert_alignment;
    args.do_cpu_sync = mode.do_cpu_sync;
    return buffer_.dispatch(args);
  }

  PendingCombine start(const std::shared_ptr<const EPHandle>& handle,
                       const CombineCase& combine_case, const CombineMode& mode) {
    const reference::CombineInput& input = combine_case.inputs[index()];
    const std::int64_t num_rows =
        handle->do_expand ? handle->num_expanded_tokens : handle->num_recv_tokens;
    const std::int64_t num_weights_per_row = handle->do_expand ? 1 : handle->num_topk;
    // Rows past the received ones are NaN: a sum that reads them shows it.
    auto x = std::make_shared<reference::BF16Row>(input.x);
    x->resize(static_cast<std::size_t>(num_rows * combine_case.options.hidden), 0x7fff);
    auto weights = std::make_shared<std::vector<float>>(input.topk_weights);
    weights->resize(static_cast<std::size_t>(num_rows * num_weights_per_row), -1.0f);

    Tensor lent;
    CombineArgs args;
    args.x = TensorView::matrix(x->data(), DType::kBFloat16, num_rows, combine_case.options.hidden);
    if (mode.is_lent) {
      lent = buffer_.empty(num_rows, combine_case.options.hidden, DType::kBFloat16);
      memory_.copy_in(lent.view.data, x->data(), x->size() * sizeof(std::uint16_t));
      args.x = lent.view;
    } else {
      args.x = memory_.upload(args.x);
    }
    args.handle = handle;
    if (mode.has_topk_weights) {
      args.topk_weights = memory_.upload(
          handle->do_expand ? TensorView::vector(weights->data(), DType::kFloat32, num_rows)
                            : TensorView::matrix(weights->data(), DType::kFloat32, num_rows,
                                                 num_weights_per_row));
    }
    for (std::size_t i = 0; i < input.bias.size(); ++i) {
      // Without tokens a bias has no elements, given or not.
      if (input.bias[i].empty()) continue;
      args.bias[i] =
          memory_.upload(TensorView::matrix(address_of(input.bias[i]), DType::kBFloat16,
                                            routing_.num_tokens, combine_case.options.hidden));
    }
    args.num_sms = mode.num_sms;
    args.is_async = mode.is_async;
    args.defer_epilogue = mode.defer_epilogue;
    args.stream = memory_.stream();
    args.keep_alive =
        std::make_shared<std::tuple<decltype(x), decltype(weights), Tensor>>(x, weights, lent);
    return buffer_.combine(args);
  }

  /// Waits for a dispatch and compares all that it returns with the reference.
  std::shared_ptr<const EPHandle> check(const DispatchData& data, const DispatchMode& mode,
                                        const PendingDispatch& pending) {
    EXPECT_TRUE(mode.is_async || !memory_.is_host() || pending.event().is_done());
    DispatchOutputs outputs = pending.outputs();
    pending.event().wait();
    for (Tensor* tensor : {&outputs.recv_x, &outputs.recv_x_sf, &outputs.recv_topk_idx,
                           &outputs.recv_topk_weights}) {
      *tensor = memory_.download(*tensor);
    }
    EXPECT_NE(outputs.handle, nullptr);
    if (!outputs.handle) return nullptr;
    check_handle(download(*outputs.handle), mode);
    check_data(data, mode, outputs);
    return outputs.handle;
  }

  /// Waits for a combine and compares all that it returns with the reference.
  void check(const CombineCase& combine_case, const CombineMode& mode,
             const PendingCombine& pending) {
    EXPECT_TRUE(mode.is_async || !memory_.is_host() || pending.event().is_done());
    CombineOutputs outputs = pending.outputs();
    EXPECT_TRUE(!mode.defer_epilogue || !memory_.is_host() || pending.event().is_done());
    pending.event().wait();
    outputs.combined_x = memory_.download(outputs.combined_x);
    outputs.combined_topk_weights = memory_.download(outputs.combined_topk_weights);
    const reference::CombineOutput& expected = combine_case.expected[index()];
    expect_shape(outputs.combined_x, "combined_x", DType::kBFloat16, routing_.num_tokens,
                 combine_case.options.hidden);
    const auto describe = [](std::int64_t row) { return "token " + std::to_string(row); };
    expect_rows({.name = "combined_x",
                 .rank_idx = rank_idx_,
                 .num_columns = combine_case.options.hidden,
                 .describe = describe},
                outputs.combined_x.view, expected.x);
    EXPECT_EQ(outputs.combined_topk_weights.is_given(), mode.has_topk_weights);
    if (!mode.has_topk_weights) return;
    expect_shape(outputs.combined_topk_weights, "combined_topk_weights", DType::kFloat32,
                 routing_.num_tokens, problem_.shape.num_topk);
    expect_rows({.name = "combined_topk_weights",
                 .rank_idx = rank_idx_,
                 .num_columns = problem_.shape.num_topk,
                 .describe = describe},
                outputs.combined_topk_weights.view, expected.topk_weights);
  }

 private:
  EPHandle download(EPHandle handle) const {
    for (Tensor* tensor :
         {&handle.psum_num_recv_tokens_per_scaleup_rank, &handle.psum_num_recv_tokens_per_expert,
          &handle.num_unaligned_recv_tokens_per_expert, &handle.recv_src_metadata,
          &handle.dst_rows}) {
      *tensor = memory_.download(*tensor);
    }
    return handle;
  }

  std::size_t index() const { return static_cast<std::size_t>(rank_idx_); }

  DispatchArgs data_args(const DispatchData& data, const DispatchMode& mode) {
    const reference::DispatchInput& input = data.inputs[index()];
    DispatchArgs args;
    args.x = memory_.upload(
        TensorView::matrix(address_of(input.x), data.x_dtype, routing_.num_tokens, data.hidden));
    if (data.num_sf_packs > 0) {
      args.x_sf = TensorView::matrix(address_of(input.x_sf), data.sf_dtype, routing_.num_tokens,
                                     data.num_sf_packs);
      args.x_sf.strides = {input.sf_token_stride, input.sf_pack_stride};
      args.x_sf = memory_.upload(args.x_sf);
    }
    if (mode.has_topk_weights) {
      args.topk_weights =
          memory_.upload(TensorView::matrix(address_of(input.topk_weights), DType::kFloat32,
                                            routing_.num_tokens, problem_.shape.num_topk));
    }
    args.do_expand = mode.do_expand;
    args.do_zero_padding = mode.do_zero_padding;
    args.use_tma_aligned_col_major_sf = mode.use_tma_aligned_col_major_sf;
    args.is_async = mode.is_async;
    args.num_sms = mode.num_sms;
    args.stream = memory_.stream();
    return args;
  }

  /// Rows of an output without CPU sync: R * M, or what those could expand to.
  std::int64_t num_worst_case_rows(bool do_expand) const {
    const ProblemShape& shape = problem_.shape;
    const std::int64_t num_tokens = std::int64_t{shape.num_ranks()} * shape.num_max_tokens_per_rank;
    if (!do_expand) return num_tokens;
    const std::int64_t alignment = shape.expert_alignment;
    const std::int64_t num_rows = num_tokens * std::min(shape.num_topk, shape.num_local_experts) +
                                  (alignment - 1) * shape.num_local_experts;
    return (num_rows + alignment - 1) / alignment * alignment;
  }

  static void expect_shape(const Tensor& tensor, const char* name, DType dtype,
                           std::int64_t num_rows, std::int64_t num_columns) {
    EXPECT_TRUE(tensor.is_given()) << name;
    EXPECT_EQ(tensor.view.dtype, dtype) << name;
    EXPECT_EQ(tensor.view.shape[0], num_rows) << name;
    EXPECT_EQ(tensor.view.shape[1], num_columns) << name;
  }

  std::string describe(const reference::RowSource& source) const {
    if (source.is_padding()) return "padding";
    std::string text =
        "token " + std::to_string(source.token_idx) + " of rank " + std::to_string(source.rank_idx);
    if (source.lane_idx >= 0) text += ", lane " + std::to_string(source.lane_idx);
    return text;
  }

  void check_handle(const EPHandle& handle, const DispatchMode& mode) const {
    const ProblemShape& shape = problem_.shape;
    EXPECT_EQ(handle.num_experts, shape.num_experts());
    EXPECT_EQ(handle.num_topk, shape.num_topk);
    EXPECT_EQ(handle.expert_alignment, shape.expert_alignment);
    EXPECT_EQ(handle.num_max_tokens_per_rank, shape.num_max_tokens_per_rank);
    EXPECT_EQ(handle.do_expand, mode.do_expand);
    EXPECT_EQ(handle.has_exact_counts, mode.do_cpu_sync);
    EXPECT_EQ(handle.num_tokens, routing_.num_tokens);
    if (mode.do_cpu_sync) {
      EXPECT_EQ(handle.num_recv_tokens, std::ssize(routing_.compact_rows));
      EXPECT_EQ(handle.num_expanded_tokens, std::ssize(routing_.expanded_rows));
      EXPECT_EQ(handle.num_recv_tokens_per_expert_list, routing_.num_recv_tokens_per_expert);
    } else {
      EXPECT_EQ(handle.num_recv_tokens, num_worst_case_rows(false));
      EXPECT_EQ(handle.num_expanded_tokens, num_worst_case_rows(true));
      EXPECT_TRUE(handle.num_recv_tokens_per_expert_list.empty());
    }
    const auto check_counts = [&](const char* name, const Tensor& tensor,
                                  const std::vector<std::int32_t>& expected) {
      expect_shape(tensor, name, DType::kInt32, std::ssize(expected), 1);
      EXPECT_EQ(tensor.view.num_dims, 1) << name;
      expect_rows({.name = name, .rank_idx = rank_idx_}, tensor.view, expected);
    };
    check_counts("psum_num_recv_tokens_per_scaleup_rank",
                 handle.psum_num_recv_tokens_per_scaleup_rank,
                 routing_.psum_num_recv_tokens_per_scaleup_rank);
    check_counts("psum_num_recv_tokens_per_expert", handle.psum_num_recv_tokens_per_expert,
                 mode.do_expand ? routing_.expanded_psum_num_recv_tokens_per_expert
                                : routing_.compact_psum_num_recv_tokens_per_expert);
    check_counts("num_unaligned_recv_tokens_per_expert",
                 handle.num_unaligned_recv_tokens_per_expert,
                 routing_.num_unaligned_recv_tokens_per_expert);

    expect_shape(handle.dst_rows, "dst_rows", DType::kInt32, routing_.num_tokens, shape.num_topk);
    expect_rows({.name = "dst_rows", .rank_idx = rank_idx_, .num_columns = shape.num_topk},
                handle.dst_rows.view,
                mode.do_expand ? routing_.expanded_dst_rows : routing_.compact_dst_rows);
    check_metadata(handle, mode);
  }

  void check_metadata(const EPHandle& handle, const DispatchMode& mode) const {
    const int num_columns = problem_.shape.num_topk + 2;
    expect_shape(handle.recv_src_metadata, "recv_src_metadata", DType::kInt32,
                 handle.num_recv_tokens, num_columns);
    // A compact dispatch fills only the first two columns, and -1 for lanes on other ranks.
    TensorView view = handle.recv_src_metadata.view;
    std::vector<std::int32_t> expected = routing_.recv_src_metadata;
    std::vector<std::int32_t> seen(static_cast<std::size_t>(view.num_elements()));
    for (std::size_t i = 0; i < std::min(seen.size(), expected.size()); ++i) {
      const auto row = static_cast<std::int64_t>(i) / num_columns;
      const auto column = static_cast<std::int64_t>(i) % num_columns;
      seen[i] = view.as<std::int32_t>()[row * view.strides[0] + column * view.strides[1]];
      if (!mode.do_expand && column >= 2 && expected[i] >= 0) seen[i] = expected[i];
    }
    view.data = seen.data();
    view.strides = {num_columns, 1};
    expect_rows({.name = "recv_src_metadata", .rank_idx = rank_idx_, .num_columns = num_columns},
                view, expected);
  }

  void check_data(const DispatchData& data, const DispatchMode& mode,
                  const DispatchOutputs& outputs) const {
    const ProblemShape& shape = problem_.shape;
    const auto& sources = mode.do_expand ? routing_.expanded_rows : routing_.compact_rows;
    const std::int64_t num_rows =
        mode.do_cpu_sync ? std::ssize(sources) : num_worst_case_rows(mode.do_expand);
    const auto expected = reference::dispatch(problem_.routing,
                                              {.hidden_bytes = data.row_bytes(),
                                               .num_sf_packs = data.num_sf_packs,
                                               .has_topk_weights = mode.has_topk_weights,
                                               .do_expand = mode.do_expand},
                                              data.inputs)[index()];
    const auto rows = [&](const char* name, std::int64_t num_columns) {
      return RowsToCompare{
          .name = name,
          .rank_idx = rank_idx_,
          .num_columns = num_columns,
          .is_skipped =
              [&](std::int64_t row) {
                return !mode.do_zero_padding && sources[static_cast<std::size_t>(row)].is_padding();
              },
          .describe =
              [&](std::int64_t row) { return describe(sources[static_cast<std::size_t>(row)]); }};
    };

    expect_shape(outputs.recv_x, "recv_x", data.x_dtype, num_rows, data.hidden);
    EXPECT_TRUE(outputs.recv_x.view.is_contiguous());
    if (data.x_dtype == DType::kBFloat16) {
      std::vector<std::uint16_t> expected_x(expected.x.size() / 2);
      if (!expected_x.empty()) std::memcpy(expected_x.data(), expected.x.data(), expected.x.size());
      expect_rows(rows("recv_x", data.hidden), outputs.recv_x.view, expected_x);
    } else {
      expect_rows(rows("recv_x", data.hidden), outputs.recv_x.view, expected.x);
    }

    EXPECT_EQ(outputs.recv_x_sf.is_given(), data.num_sf_packs > 0);
    if (data.num_sf_packs > 0) {
      expect_shape(outputs.recv_x_sf, "recv_x_sf", data.sf_dtype, num_rows, data.num_sf_packs);
      const auto& strides = outputs.recv_x_sf.view.strides;
      EXPECT_EQ(strides[0], mode.use_tma_aligned_col_major_sf ? 1 : data.num_sf_packs);
      EXPECT_EQ(strides[1], mode.use_tma_aligned_col_major_sf ? (num_rows + 3) / 4 * 4 : 1);
      expect_rows(rows("recv_x_sf", data.num_sf_packs), outputs.recv_x_sf.view, expected.x_sf);
    }

    EXPECT_EQ(outputs.recv_topk_idx.is_given(), !mode.do_expand);
    if (!mode.do_expand) {
      expect_shape(outputs.recv_topk_idx, "recv_topk_idx", shape.idx_dtype, num_rows,
                   shape.num_topk);
      if (shape.idx_dtype == DType::kInt64) {
        expect_rows(rows("recv_topk_idx", shape.num_topk), outputs.recv_topk_idx.view,
                    routing_.recv_topk_idx);
      } else {
        expect_rows(rows("recv_topk_idx", shape.num_topk), outputs.recv_topk_idx.view,
                    std::vector<std::int32_t>(routing_.recv_topk_idx.begin(),
                                              routing_.recv_topk_idx.end()));
      }
    }

    EXPECT_EQ(outputs.recv_topk_weights.is_given(), mode.has_topk_weights);
    if (mode.has_topk_weights) {
      const std::int64_t num_columns = mode.do_expand ? 1 : shape.num_topk;
      expect_shape(outputs.recv_topk_weights, "recv_topk_weights", DType::kFloat32, num_rows,
                   num_columns);
      EXPECT_EQ(outputs.recv_topk_weights.view.num_dims, mode.do_expand ? 1 : 2);
      expect_rows(rows("recv_topk_weights", num_columns), outputs.recv_topk_weights.view,
                  expected.topk_weights);
    }
  }

  const Problem& problem_;
  EPBuffer& buffer_;
  DeviceMemory memory_;
  int rank_idx_;
  const reference::RankRouting& routing_;
};

}  // namespace deep_ep::testing
