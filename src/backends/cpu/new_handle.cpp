#include "backends/cpu/new_handle.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "backends/ep_outputs.hpp"

namespace deep_ep::cpu {

namespace {

std::span<std::int32_t> ints(const Tensor& tensor) {
  return {tensor.as<std::int32_t>(), static_cast<std::size_t>(tensor.view.num_elements())};
}

Tensor private_ints(std::int64_t size) {
  return make_private_tensor(TensorView::vector(nullptr, DType::kInt32, size));
}

}  // namespace

std::shared_ptr<EPHandle> make_handle(const DispatchPlan& plan) {
  const RoutingShape& shape = plan.shape;
  auto handle = make_bare_handle(plan);
  handle->psum_num_recv_tokens_per_scaleup_rank = private_ints(shape.topology.num_scaleup_ranks);
  handle->psum_num_recv_tokens_per_expert = private_ints(shape.num_local_experts());
  handle->num_unaligned_recv_tokens_per_expert = private_ints(shape.num_local_experts());
  handle->dst_rows = make_private_tensor(
      TensorView::matrix(nullptr, DType::kInt32, plan.num_tokens, shape.num_topk));
  return handle;
}

void fill_handle(EPHandle& handle, const DispatchPlan& plan,
                 std::shared_ptr<const EPRouting> routing) {
  const RoutingShape& shape = plan.shape;
  const ReceiveCounts& received = routing->received;
  const auto per_place = ints(handle.psum_num_recv_tokens_per_scaleup_rank);
  for (int source = 0; source < shape.num_ranks(); ++source) {
    per_place[static_cast<std::size_t>(source % shape.topology.num_scaleup_ranks)] +=
        received.tokens_from_source[static_cast<std::size_t>(source)];
  }
  std::partial_sum(per_place.begin(), per_place.end(), per_place.begin());
  for (std::size_t e = 0; e < received.expert_counts.size(); ++e) {
    const std::int64_t num_tokens = received.expert_counts[e];
    const std::int64_t num_aligned = align_up(num_tokens, shape.expert_alignment);
    ints(handle.num_unaligned_recv_tokens_per_expert)[e] = static_cast<std::int32_t>(num_tokens);
    ints(handle.psum_num_recv_tokens_per_expert)[e] = static_cast<std::int32_t>(
        received.expert_starts[e] + (shape.do_expand ? num_tokens : num_aligned));
    if (plan.has_exact_counts) handle.num_recv_tokens_per_expert_list.push_back(num_aligned);
  }
  if (plan.has_exact_counts) {
    handle.num_recv_tokens = received.num_tokens;
    handle.num_expanded_tokens = received.num_aligned_rows;
  }
  std::ranges::transform(routing->own.lanes, handle.dst_rows.as<std::int32_t>(),
                         [](const Lane& lane) { return lane.row; });
  handle.routing = std::move(routing);
}

}  // namespace deep_ep::cpu
