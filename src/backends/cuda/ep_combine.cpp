#include "backends/cuda/ep_combine.hpp"

#include <utility>

namespace deep_ep::cuda {

namespace {

constexpr int kNumWarps = 16;

}  // namespace

Combine::Combine(const CombineArgs& args, const CombinePlan& plan, bool allow_multiple_reduction,
                 const CallContext& context, StreamOrder& order, CUstream stream)
    : args_(args),
      plan_(plan),
      allow_multiple_reduction_(allow_multiple_reduction),
      context_(context),
      order_(order),
      stream_(stream),
      routing_(routing_of(*args.handle)) {
  Lender& lender = *context_.lender;
  outputs_.combined_x = lender.lend_matrix(plan.num_tokens, plan.hidden, DType::kBFloat16);
  if (plan.has_weights) {
    outputs_.combined_topk_weights =
        lender.lend_matrix(plan.num_tokens, plan.shape.num_topk, DType::kFloat32);
  }
  stage();
  if (args.defer_epilogue) {
    event_ = order_.end(stream_);
  } else {
    combine();
  }
}

void Combine::stage() {
  const Arena& arena = *context_.arena;
  Lender& lender = *context_.lender;
  const EPHandle& handle = *args_.handle;
  const bool is_lent = arena.offset_of(args_.x.data, args_.x.num_bytes()) >= 0;
  if (sums_first()) {
    staged_x_ = lender.lend_matrix(handle.num_recv_tokens, plan_.hidden, DType::kBFloat16);
  } else if (!is_lent) {
    staged_x_ = lender.lend_matrix(plan_.num_rows, plan_.hidden, DType::kBFloat16);
  }
  const TensorView& weights = args_.topk_weights;
  if (plan_.has_weights && arena.offset_of(weights.data, weights.num_bytes()) < 0) {
    staged_weights_ = lender.lend_matrix(weights.shape[0], weights.shape[1], DType::kFloat32);
  }
  if (!staged_x_.is_given() && !staged_weights_.is_given()) return;
  const abi::CombineStageParams params = {
      .context = context_.abi,
      .x = args_.x.as<const std::uint8_t>(),
      .staged_x = staged_x_.as<std::uint8_t>(),
      .topk_weights = weights.as<const float>(),
      .staged_topk_weights = staged_weights_.as<float>(),
      .metadata = handle.recv_src_metadata.as<const std::int32_t>(),
      .received = routing_->received.as<const abi::Received>(),
      .row_bytes = plan_.row_bytes,
      .num_topk = plan_.shape.num_topk,
      .do_expand = plan_.shape.do_expand ? 1 : 0,
      .sums_rows = sums_first() ? 1 : 0,
      .copy_width = copy_width(plan_.row_bytes, {args_.x.data})};
  context_.kernels->launch(KernelId::kCombineStage,
                           {.num_blocks = context_.num_blocks(plan_.num_sms, plan_.num_sms),
                            .num_threads = kWarp * kNumWarps,
                            .shared_bytes = 0},
                           stream_, params);
}

void Combine::combine() {
  const CurrentContext current(*context_.device);
  const Arena& arena = *context_.arena;
  const RoutingShape& shape = plan_.shape;
  const auto offset = [&arena](const TensorView& tensor) {
    return tensor.num_elements() == 0 ? -1 : arena.offset_of(tensor.data, 1);
  };
  const abi::Offer offer = {.x = offset(staged_x_.is_given() ? staged_x_.view : args_.x),
                            .sf = -1,
                            .topk_idx = -1,
                            .topk_weights = offset(staged_weights_.is_given() ? staged_weights_.view
                                                                              : args_.topk_weights),
                            .metadata = -1,
                            .sf_row_stride = 0,
                            .sf_column_stride = 0,
                            .unused = 0};
  const bool has_lane_rows = shape.do_expand && !allow_multiple_reduction_;
  const abi::CombineParams params = {
      .context = context_.abi,
      .announcement = announcement_of(terms_of(plan_), plan_.num_tokens),
      .offer = offer,
      .lanes = routing_->lanes.as<const abi::Lane>(),
      .bias = {args_.bias[0].as<const std::uint8_t>(), args_.bias[1].as<const std::uint8_t>()},
      .combined_x = outputs_.combined_x.as<std::uint8_t>(),
      .combined_topk_weights = outputs_.combined_topk_weights.as<float>(),
      .num_tokens = plan_.num_tokens,
      .row_bytes = plan_.row_bytes,
      .num_topk = shape.num_topk,
      .num_scaleup_ranks = shape.topology.num_scaleup_ranks,
      .do_expand = shape.do_expand ? 1 : 0,
      .has_lane_rows = has_lane_rows ? 1 : 0,
      .rounds_per_domain = allow_multiple_reduction_ && shape.topology.is_hybrid() ? 1 : 0,
      .copy_width = copy_width(plan_.row_bytes, {args_.bias[0].data, args_.bias[1].data})};
  context_.kernels->launch(
      KernelId::kCombine,
      {.num_blocks =
           context_.num_blocks((plan_.num_tokens + kNumWarps - 1) / kNumWarps, plan_.num_sms),
       .num_threads = kWarp * kNumWarps,
       .shared_bytes = context_.abi.num_ranks * static_cast<int>(sizeof(abi::Offer))},
      stream_, params);
  event_ = order_.end(stream_, std::move(args_.keep_alive));
  is_combined_ = true;
}

CombineOutputs Combine::outputs(void* stream) {
  const std::scoped_lock lock(mutex_);
  if (is_combined_) return outputs_;
  order_.follow(stream_, static_cast<CUstream>(stream));
  combine();
  return outputs_;
}

Event Combine::event() const {
  const std::scoped_lock lock(mutex_);
  return Event(event_);
}

}  // namespace deep_ep::cuda
