#pragma once
// What a kind of memory has to offer for EPBuffer: the same calls, with arguments already checked.
#include <memory>
#include <string>

#include "core/ep_plan.hpp"
#include "deep_ep/ep_buffer.hpp"

namespace deep_ep {

/// A dispatch that was started. Functions are thread-safe; see PendingDispatch.
class DispatchCall {
 public:
  virtual ~DispatchCall() = default;
  virtual DispatchOutputs outputs() = 0;
  virtual Event event() const = 0;
};

/// A combine that was started. Functions are thread-safe; see PendingCombine.
class CombineCall {
 public:
  virtual ~CombineCall() = default;
  virtual CombineOutputs outputs(void* stream) = 0;
  virtual Event event() const = 0;
};

class EPBackend {
 public:
  virtual ~EPBackend() = default;
  virtual std::shared_ptr<DispatchCall> dispatch(const DispatchArgs& args,
                                                 const DispatchPlan& plan) = 0;
  virtual std::shared_ptr<CombineCall> combine(const CombineArgs& args,
                                               const CombinePlan& plan) = 0;
  /// Takes part in the next call only to say that this rank cannot: the peers throw `reason`.
  virtual void refuse(const char* operation, const std::string& reason) = 0;
  virtual Event barrier(void* stream) = 0;
  virtual void* comm_stream() = 0;
  virtual int num_device_sms() const noexcept = 0;
  /// Throws the first error of a buffer that takes no more calls.
  virtual void require_usable() = 0;
  virtual Tensor empty(std::int64_t num_rows, std::int64_t num_columns, DType dtype,
                       void* stream) = 0;
  virtual void destroy() = 0;
  virtual const EPBufferOptions& options() const noexcept = 0;
  virtual const Topology& physical_topology() const noexcept = 0;
  virtual const Topology& logical_topology() const noexcept = 0;
};

}  // namespace deep_ep
