#pragma once
// Combine between CUDA ranks: ep_combine_stage where peers can't read the input as it lies, then
// ep_combine.
#include <memory>
#include <mutex>

#include "backends/cuda/ep_call.hpp"
#include "backends/ep_backend.hpp"

namespace deep_ep::cuda {

class Combine : public CombineCall {
 public:
  /// Puts the call on `stream`; a deferred epilogue waits for outputs().
  Combine(const CombineArgs& args, const CombinePlan& plan, bool allow_multiple_reduction,
          const CallContext& context, StreamOrder& order, CUstream stream);

  CombineOutputs outputs(void* stream) override;
  Event event() const override;

 private:
  bool sums_first() const { return plan_.shape.do_expand && allow_multiple_reduction_; }
  void stage();
  void combine();

  CombineArgs args_;
  const CombinePlan plan_;
  const bool allow_multiple_reduction_;
  const CallContext context_;
  StreamOrder& order_;
  const CUstream stream_;
  std::shared_ptr<const DeviceRouting> routing_;
  Tensor staged_x_, staged_weights_;  // in the window, until the call is over in stream order
  CombineOutputs outputs_;
  std::shared_ptr<CallEvent> event_;
  mutable std::mutex mutex_;
  bool is_combined_ = false;
};

}  // namespace deep_ep::cuda
