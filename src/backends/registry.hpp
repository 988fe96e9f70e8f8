#pragma once
// Which backends this build has; the one place that names them.
#include <memory>

#include "backends/ep_backend.hpp"
#include "deep_ep/bootstrap.hpp"

namespace deep_ep {

/// Collective. The backend for the device that the options name.
std::unique_ptr<EPBackend> make_ep_backend(std::shared_ptr<Bootstrap> bootstrap,
                                           const EPBufferOptions& options);

}  // namespace deep_ep
