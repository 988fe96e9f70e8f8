#pragma once
#include <memory>

#include "backends/ep_backend.hpp"
#include "deep_ep/bootstrap.hpp"

namespace deep_ep::cuda {

/// Collective. The backend for ranks on GPUs that can address each other's memory. Throws on all
/// ranks or on none: kUnsupported, kDevice, kInvalidArgument, kTimeout.
std::unique_ptr<EPBackend> make_ep_backend(std::shared_ptr<Bootstrap> bootstrap,
                                           const EPBufferOptions& options);

}  // namespace deep_ep::cuda
