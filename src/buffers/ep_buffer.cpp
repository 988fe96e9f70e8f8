// EPBuffer: checks the arguments in core, runs the call on the backend.
#include "deep_ep/ep_buffer.hpp"

#include "backends/ep_backend.hpp"
#include "backends/registry.hpp"
#include "core/ep_plan.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {

namespace {

// Plans a call; when that throws, the peers hear why before the caller does.
template <typename Plan>
auto plan_or_refuse(EPBackend& backend, const char* operation, const Plan& plan) {
  backend.require_usable();
  try {
    return plan();
  } catch (const Error& error) {
    backend.refuse(operation, error.what());
    throw;
  }
}

}  // namespace

DispatchOutputs PendingDispatch::outputs() const { return call_->outputs(); }
Event PendingDispatch::event() const { return call_->event(); }
CombineOutputs PendingCombine::outputs(void* stream) const { return call_->outputs(stream); }
Event PendingCombine::event() const { return call_->event(); }

EPBuffer::EPBuffer(std::shared_ptr<Bootstrap> bootstrap, const EPBufferOptions& options)
    : backend_(make_ep_backend(std::move(bootstrap), options)) {}

EPBuffer::~EPBuffer() = default;

PendingDispatch EPBuffer::dispatch(const DispatchArgs& args) {
  const DispatchPlan plan = plan_or_refuse(
      *backend_, "dispatch", [&] { return plan_dispatch(args, options(), logical_topology()); });
  return PendingDispatch(backend_->dispatch(args, plan));
}

PendingCombine EPBuffer::combine(const CombineArgs& args) {
  const CombinePlan plan = plan_or_refuse(
      *backend_, "combine", [&] { return plan_combine(args, options(), logical_topology()); });
  return PendingCombine(backend_->combine(args, plan));
}

void EPBuffer::refuse_call(const std::string& reason) {
  backend_->require_usable();
  backend_->refuse("call", reason);
}

Event EPBuffer::barrier(void* stream) { return backend_->barrier(stream); }

void* EPBuffer::comm_stream() { return backend_->comm_stream(); }
int EPBuffer::num_device_sms() const noexcept { return backend_->num_device_sms(); }

Tensor EPBuffer::empty(std::int64_t num_rows, std::int64_t num_columns, DType dtype, void* stream) {
  return backend_->empty(num_rows, num_columns, dtype, stream);
}

void EPBuffer::destroy() { backend_->destroy(); }

const EPBufferOptions& EPBuffer::options() const noexcept { return backend_->options(); }
const Topology& EPBuffer::physical_topology() const noexcept {
  return backend_->physical_topology();
}
const Topology& EPBuffer::logical_topology() const noexcept { return backend_->logical_topology(); }

}  // namespace deep_ep
