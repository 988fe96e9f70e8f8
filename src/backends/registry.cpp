#include "backends/registry.hpp"

#include "backends/cpu/ep_backend.hpp"

namespace deep_ep {

std::unique_ptr<EPBackend> make_ep_backend(std::shared_ptr<Bootstrap> bootstrap,
                                           const EPBufferOptions& options) {
  return cpu::make_ep_backend(std::move(bootstrap), options);
}

}  // namespace deep_ep
