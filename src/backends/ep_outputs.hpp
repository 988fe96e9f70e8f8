#pragma once
// What a dispatch returns, on every backend: lent memory, and the numbers of a new handle.
#include <cstdint>
#include <memory>

#include "backends/lender.hpp"
#include "core/ep_plan.hpp"
#include "deep_ep/ep_buffer.hpp"

namespace deep_ep {

/// Lends the tensors of `outputs` for `num_rows` received rows.
void lend_received(Lender& lender, const DispatchArgs& args, const DispatchPlan& plan,
                   std::int64_t num_rows, DispatchOutputs& outputs);

/// A handle with all numbers that are known before the counts, and without tensors.
std::shared_ptr<EPHandle> make_bare_handle(const DispatchPlan& plan);

}  // namespace deep_ep
