#include "backends/registry.hpp"

#include <utility>

#include "backends/cpu/ep_backend.hpp"
#include "backends/cuda/ep_backend.hpp"

namespace deep_ep {

std::unique_ptr<EPBackend> make_ep_backend(std::shared_ptr<Bootstrap> bootstrap,
                                           const EPBufferOptions& options) {
  if (options.cuda_device == kHostMemory) {
    return cpu::make_ep_backend(std::move(bootstrap), options);
  }
  return cuda::make_ep_backend(std::move(bootstrap), options);
}

}  // namespace deep_ep
