#pragma once
// The handle that a dispatch makes: its fixed part before the exchange, its counts after it.
#include <memory>

#include "backends/cpu/ep_call.hpp"
#include "core/ep_plan.hpp"
#include "deep_ep/ep_buffer.hpp"

namespace deep_ep::cpu {

/// All that is known before the exchange; without exact counts that includes the shapes.
std::shared_ptr<EPHandle> make_handle(const DispatchPlan& plan);

/// Fills in what the counts say: tensors, and the shapes if they are exact.
void fill_handle(EPHandle& handle, const DispatchPlan& plan,
                 std::shared_ptr<const EPRouting> routing);

}  // namespace deep_ep::cpu
