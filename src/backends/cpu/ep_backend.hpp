#pragma once
// EPBuffer on CPU ranks, which are processes or threads of one machine.
#include <memory>

#include "backends/ep_backend.hpp"
#include "deep_ep/bootstrap.hpp"

namespace deep_ep::cpu {

/// Collective. Throws kInvalidArgument that lists what differs between ranks.
std::unique_ptr<EPBackend> make_ep_backend(std::shared_ptr<Bootstrap> bootstrap,
                                           const EPBufferOptions& options);

}  // namespace deep_ep::cpu
