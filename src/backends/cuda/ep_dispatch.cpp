#include "backends/cuda/ep_dispatch.hpp"

#include <algorithm>
#include <utility>

#include "backends/ep_outputs.hpp"
#include "base/check.hpp"
#include "base/config.hpp"

namespace deep_ep::cuda {

namespace {

int ceil_div(std::int64_t value, std::int64_t divisor) {
  return static_cast<int>((value + divisor - 1) / divisor);
}

// A chunk of tokens is what one warp counts and places at a time: few enough to share a small batch
// between warps, so many that the counts of all chunks stay small.
int tokens_per_chunk(const DispatchPlan& plan) {
  constexpr std::int64_t kLeast = 32, kMostCounts = std::int64_t{1} << 20;
  const std::int64_t columns = plan.shape.num_ranks() + plan.shape.num_experts;
  const std::int64_t most_chunks = std::max<std::int64_t>(1, kMostCounts / columns);
  return static_cast<int>(std::max(kLeast, align_up(ceil_div(plan.num_tokens, most_chunks), 32)));
}

}  // namespace

Dispatch::Dispatch(const DispatchArgs& args, const DispatchPlan& plan, const CallContext& context,
                   StreamOrder& order, CUstream stream, std::uint64_t ticket)
    : args_(args), plan_(plan), context_(context), order_(order), stream_(stream), ticket_(ticket) {
  Lender& lender = *context_.lender;
  const RoutingShape& shape = plan.shape;
  if (plan.is_cached) {
    outputs_.handle = args.handle;
    routing_ = routing_of(*args.handle);
    lend_received(lender, args, plan,
                  shape.do_expand ? args.handle->num_expanded_tokens : args.handle->num_recv_tokens,
                  outputs_);
    move();
    return;
  }
  new_handle_ = make_bare_handle(plan);
  outputs_.handle = new_handle_;
  if (ticket_ == 0) {
    lend_received(lender, args, plan, worst_case_rows(shape, plan.num_max_tokens_per_rank),
                  outputs_);
    new_handle_->recv_src_metadata =
        lender.lend_matrix(new_handle_->num_recv_tokens, shape.num_topk + 2, DType::kInt32);
  }
  count();
  if (ticket_ == 0) {
    move();
  } else {
    event_ = order_.end(stream_);
  }
}

void Dispatch::count() {
  Lender& lender = *context_.lender;
  const RoutingShape& shape = plan_.shape;
  EPHandle& handle = *new_handle_;
  const int num_local = shape.num_local_experts();
  handle.psum_num_recv_tokens_per_scaleup_rank =
      lender.lend_vector(shape.topology.num_scaleup_ranks, DType::kInt32);
  handle.psum_num_recv_tokens_per_expert = lender.lend_vector(num_local, DType::kInt32);
  handle.num_unaligned_recv_tokens_per_expert = lender.lend_vector(num_local, DType::kInt32);
  handle.dst_rows = lender.lend_matrix(plan_.num_tokens, shape.num_topk, DType::kInt32);
  const std::int64_t num_lanes = plan_.num_tokens * shape.num_topk;
  auto routing = std::make_shared<DeviceRouting>();
  routing->lanes =
      lender.lend_vector(num_lanes * static_cast<std::int64_t>(sizeof(abi::Lane)), DType::kUInt8);
  routing->received = lender.lend_vector(sizeof(abi::Received), DType::kUInt8);
  routing_ = routing;
  handle.routing = std::move(routing);

  const int columns = shape.num_ranks() + shape.num_experts;
  const int chunk = tokens_per_chunk(plan_);
  const int chunks = ceil_div(plan_.num_tokens, chunk);
  const Tensor scratch =
      lender.lend_matrix(std::max(chunks, 1), columns, DType::kInt32);  // stream order reuses it
  const int column_bytes = columns * 4;
  const int most_warps = context_.device->max_shared_bytes() / column_bytes - 1;
  require(most_warps >= 1, "num_experts must be below ",
          context_.device->max_shared_bytes() / 8 - shape.num_ranks(), " on this GPU, got ",
          shape.num_experts);
  const int num_warps = std::min(16, most_warps);

  // The worst case of expanded rows holds only without the same expert twice.
  const bool is_bounded = !plan_.has_exact_counts && shape.do_expand && shape.num_topk > num_local;
  const abi::CountParams params = {
      .context = context_.abi,
      .announcement = announcement_of(terms_of(plan_), plan_.num_tokens),
      .topk_idx = args_.topk_idx.data,
      .num_tokens = plan_.num_tokens,
      .num_max_tokens_per_rank = plan_.num_max_tokens_per_rank,
      .num_topk = shape.num_topk,
      .num_experts = shape.num_experts,
      .num_local_experts = num_local,
      .expert_alignment = shape.expert_alignment,
      .num_scaleup_ranks = shape.topology.num_scaleup_ranks,
      .most_lanes_on_rank = is_bounded ? num_local : kMaxTopk,
      .is_idx_wide = plan_.idx_dtype == DType::kInt64 ? 1 : 0,
      .do_expand = shape.do_expand ? 1 : 0,
      .ends_on_problem = ticket_ != 0 ? 1 : 0,
      .tokens_per_chunk = chunk,
      .num_chunks = chunks,
      .chunk_counts = scratch.as<std::int32_t>(),
      .lanes = routing_->lanes.as<abi::Lane>(),
      .dst_rows = handle.dst_rows.as<std::int32_t>(),
      .received = routing_->received.as<abi::Received>(),
      .psum_num_recv_tokens_per_scaleup_rank =
          handle.psum_num_recv_tokens_per_scaleup_rank.as<std::int32_t>(),
      .psum_num_recv_tokens_per_expert = handle.psum_num_recv_tokens_per_expert.as<std::int32_t>(),
      .num_unaligned_recv_tokens_per_expert =
          handle.num_unaligned_recv_tokens_per_expert.as<std::int32_t>(),
      .cumulative_stats = args_.cumulative_local_expert_recv_stats.as<std::int32_t>(),
      .host_expert_counts = context_.status->device_expert_counts(),
      .ticket = ticket_};
  context_.kernels->launch(
      KernelId::kCount,
      {.num_blocks = context_.num_blocks(ceil_div(chunks, num_warps), plan_.num_sms),
       .num_threads = kWarp * num_warps,
       .shared_bytes = (num_warps + 1) * column_bytes},
      stream_, params);
}

void Dispatch::wait_for_counts() {
  const RoutingShape& shape = plan_.shape;
  const Status::Counts counts =
      context_.status->wait_for_counts(ticket_, shape.num_local_experts(), *context_.links);
  new_handle_->num_recv_tokens = counts.num_tokens;
  new_handle_->num_expanded_tokens = counts.num_aligned_rows;
  for (const std::int64_t num_tokens : counts.of_experts) {
    new_handle_->num_recv_tokens_per_expert_list.push_back(
        align_up(num_tokens, shape.expert_alignment));
  }
  try {
    lend_received(*context_.lender, args_, plan_,
                  shape.do_expand ? counts.num_aligned_rows : counts.num_tokens, outputs_);
    new_handle_->recv_src_metadata =
        context_.lender->lend_matrix(counts.num_tokens, shape.num_topk + 2, DType::kInt32);
  } catch (const Error& error) {
    // The peers wait for memory that this rank has not got.
    context_.status->break_off(error);
    throw;
  }
}

void Dispatch::move() {
  const CurrentContext current(*context_.device);
  launch_move();
  if (plan_.shape.do_expand) launch_finish();
  event_ = order_.end(stream_, std::move(args_.keep_alive));
  has_moved_ = true;
}

void Dispatch::launch_move() {
  const std::int64_t row_bytes = plan_.row_bytes;
  const Arena& arena = *context_.arena;
  const auto offset = [&arena](const Tensor& tensor) {
    return tensor.view.num_elements() == 0 ? -1 : arena.offset_of(tensor.view.data, 1);
  };
  const TensorView& sf = outputs_.recv_x_sf.view;
  const abi::Offer offer = {.x = offset(outputs_.recv_x),
                            .sf = offset(outputs_.recv_x_sf),
                            .topk_idx = offset(outputs_.recv_topk_idx),
                            .topk_weights = offset(outputs_.recv_topk_weights),
                            .metadata = new_handle_ ? offset(new_handle_->recv_src_metadata) : -1,
                            .sf_row_stride = sf.strides[0],
                            .sf_column_stride = sf.strides[1],
                            .unused = 0};
  const int width = copy_width(row_bytes, {args_.x.data});
  // Stages of whole rows where they fit, at most 16 KiB each; as many as shared memory holds.
  constexpr std::int64_t kMostStageBytes = 16 << 10;
  const bool is_bulk =
      context_.device->has_bulk_copies() && width == 16 && config::cuda_bulk_copies();
  const int num_warps = is_bulk ? 4 : 16;
  const std::int64_t offers_bytes = abi::offers_bytes(context_.abi.num_ranks);
  std::int64_t stage_bytes = 0;
  int num_stages = 0;
  if (is_bulk) {
    const std::int64_t num_pieces = ceil_div(row_bytes, kMostStageBytes);
    stage_bytes = align_up(ceil_div(row_bytes, num_pieces), 128);
    const std::int64_t room = (context_.device->max_shared_bytes() - offers_bytes) / num_warps;
    num_stages = static_cast<int>(std::clamp<std::int64_t>(room / (stage_bytes + 8), 2, 8));
  }
  const abi::MoveParams params = {
      .context = context_.abi,
      .announcement = announcement_of(terms_of(plan_), plan_.num_tokens),
      .offer = offer,
      .x = args_.x.as<const std::uint8_t>(),
      .sf = args_.x_sf.as<const std::int32_t>(),
      .topk_weights = args_.topk_weights.as<const float>(),
      .lanes = routing_->lanes.as<const abi::Lane>(),
      .num_tokens = plan_.num_tokens,
      .num_max_tokens_per_rank = plan_.num_max_tokens_per_rank,
      .row_bytes = row_bytes,
      .sf_row_stride = args_.x_sf.strides[0],
      .sf_column_stride = args_.x_sf.strides[1],
      .num_sf_packs = static_cast<std::int32_t>(plan_.num_sf_packs),
      .num_topk = plan_.shape.num_topk,
      .is_idx_wide = plan_.idx_dtype == DType::kInt64 ? 1 : 0,
      .do_expand = plan_.shape.do_expand ? 1 : 0,
      .announces = plan_.is_cached ? 1 : 0,
      .ends_call = plan_.shape.do_expand ? 0 : 1,
      .copy_width = width,
      .stage_bytes = static_cast<std::int32_t>(stage_bytes),
      .num_stages = num_stages};
  const std::int64_t shared_bytes = offers_bytes + num_warps * num_stages * (stage_bytes + 8);
  context_.kernels->launch(
      KernelId::kMove,
      {.num_blocks = context_.num_blocks(ceil_div(plan_.num_tokens, num_warps), plan_.num_sms),
       .num_threads = kWarp * num_warps,
       .shared_bytes = static_cast<int>(shared_bytes)},
      stream_, params);
}

void Dispatch::launch_finish() {
  const EPHandle& handle = *outputs_.handle;
  const TensorView& sf = outputs_.recv_x_sf.view;
  const abi::FinishParams params = {
      .context = context_.abi,
      .x = outputs_.recv_x.as<std::uint8_t>(),
      .sf = sf.as<std::int32_t>(),
      .topk_weights = outputs_.recv_topk_weights.as<float>(),
      .metadata = handle.recv_src_metadata.as<const std::int32_t>(),
      .received = routing_->received.as<const abi::Received>(),
      .expert_counts = handle.num_unaligned_recv_tokens_per_expert.as<const std::int32_t>(),
      .expert_ends = handle.psum_num_recv_tokens_per_expert.as<const std::int32_t>(),
      .num_max_tokens_per_rank = plan_.num_max_tokens_per_rank,
      .row_bytes = plan_.row_bytes,
      .sf_row_stride = sf.strides[0],
      .sf_column_stride = sf.strides[1],
      .num_sf_packs = static_cast<std::int32_t>(plan_.num_sf_packs),
      .num_topk = plan_.shape.num_topk,
      .num_local_experts = plan_.shape.num_local_experts(),
      .expert_alignment = plan_.shape.expert_alignment,
      .do_zero_padding = args_.do_zero_padding ? 1 : 0,
      .copy_width = copy_width(plan_.row_bytes, {outputs_.recv_x.view.data})};
  constexpr int kNumWarps = 16;
  context_.kernels->launch(KernelId::kFinish,
                           {.num_blocks = context_.num_blocks(plan_.num_sms, plan_.num_sms),
                            .num_threads = kWarp * kNumWarps,
                            .shared_bytes = 0},
                           stream_, params);
}

DispatchOutputs Dispatch::outputs() {
  const std::scoped_lock lock(mutex_);
  if (error_) std::rethrow_exception(error_);
  if (has_moved_) return outputs_;
  try {
    wait_for_counts();
    move();
  } catch (const Error&) {
    error_ = std::current_exception();
    throw;
  }
  return outputs_;
}

Event Dispatch::event() const {
  const std::scoped_lock lock(mutex_);
  return Event(event_);
}

}  // namespace deep_ep::cuda
