#pragma once
// Dispatch between CUDA ranks: ep_count, then ep_move, then ep_finish for expanded outputs.
//
// With CPU sync the host waits between the first two for the number of received rows, and lends
// exactly those; otherwise all kernels are put on the stream at once.
#include <exception>
#include <memory>
#include <mutex>

#include "backends/cuda/ep_call.hpp"
#include "backends/ep_backend.hpp"

namespace deep_ep::cuda {

class Dispatch : public DispatchCall {
 public:
  /// Puts what can be on `stream` on it.
  Dispatch(const DispatchArgs& args, const DispatchPlan& plan, const CallContext& context,
           StreamOrder& order, CUstream stream, std::uint64_t ticket);

  DispatchOutputs outputs() override;
  Event event() const override;

 private:
  void count();
  void wait_for_counts();
  void move();
  void launch_move();
  void launch_finish();

  DispatchArgs args_;
  const DispatchPlan plan_;
  const CallContext context_;
  StreamOrder& order_;
  const CUstream stream_;
  const std::uint64_t ticket_;  // 0: no CPU sync
  DispatchOutputs outputs_;
  std::shared_ptr<EPHandle> new_handle_;  // null: cached
  std::shared_ptr<const DeviceRouting> routing_;
  std::shared_ptr<CallEvent> event_;
  mutable std::mutex mutex_;
  bool has_moved_ = false;
  std::exception_ptr error_;  // why it never will
};

}  // namespace deep_ep::cuda
