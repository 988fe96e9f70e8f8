#include "backends/ep_outputs.hpp"

namespace deep_ep {

namespace {

Tensor lend_scales(Lender& lender, const DispatchPlan& plan, std::int64_t num_rows,
                   bool is_col_major) {
  if (!is_col_major) return lender.lend_matrix(num_rows, plan.num_sf_packs, plan.sf_dtype);
  // Columns start on 16 bytes, as TMA wants them.
  const std::int64_t column = align_up(num_rows, 4);
  Tensor sf = lender.lend_matrix(plan.num_sf_packs, column, plan.sf_dtype);
  sf.view.shape = {num_rows, plan.num_sf_packs};
  sf.view.strides = {1, column};
  return sf;
}

}  // namespace

void lend_received(Lender& lender, const DispatchArgs& args, const DispatchPlan& plan,
                   std::int64_t num_rows, DispatchOutputs& outputs) {
  const RoutingShape& shape = plan.shape;
  outputs.recv_x = lender.lend_matrix(num_rows, plan.hidden, plan.x_dtype);
  if (plan.num_sf_packs != 0) {
    outputs.recv_x_sf = lend_scales(lender, plan, num_rows, args.use_tma_aligned_col_major_sf);
  }
  if (!shape.do_expand) {
    outputs.recv_topk_idx = lender.lend_matrix(num_rows, shape.num_topk, plan.idx_dtype);
  }
  if (plan.has_weights) {
    outputs.recv_topk_weights = shape.do_expand
                                    ? lender.lend_vector(num_rows, DType::kFloat32)
                                    : lender.lend_matrix(num_rows, shape.num_topk, DType::kFloat32);
  }
}

std::shared_ptr<EPHandle> make_bare_handle(const DispatchPlan& plan) {
  const RoutingShape& shape = plan.shape;
  auto handle = std::make_shared<EPHandle>();
  handle->num_experts = shape.num_experts;
  handle->num_topk = shape.num_topk;
  handle->expert_alignment = shape.expert_alignment;
  handle->num_max_tokens_per_rank = static_cast<int>(plan.num_max_tokens_per_rank);
  handle->num_sms = plan.num_sms;
  handle->do_expand = shape.do_expand;
  handle->has_exact_counts = plan.has_exact_counts;
  handle->idx_dtype = plan.idx_dtype;
  handle->topology = shape.topology;
  handle->num_tokens = plan.num_tokens;
  if (!plan.has_exact_counts) {
    RoutingShape expanded = shape;
    expanded.do_expand = true;
    handle->num_recv_tokens = shape.num_ranks() * plan.num_max_tokens_per_rank;
    handle->num_expanded_tokens = worst_case_rows(expanded, plan.num_max_tokens_per_rank);
  }
  return handle;
}

}  // namespace deep_ep
