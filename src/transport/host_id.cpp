// What identifies this machine among those of a group.
#include "base/config.hpp"
#include "deep_ep/bootstrap.hpp"
#include "os/process.hpp"

namespace deep_ep {

std::string default_host_id() {
  const std::optional<std::string> configured = config::host_id();
  return configured ? *configured : boot_id();
}

}  // namespace deep_ep
