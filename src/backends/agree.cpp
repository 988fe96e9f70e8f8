#include "backends/agree.hpp"

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "base/check.hpp"
#include "base/config.hpp"
#include "core/ep_plan.hpp"
#include "transport/agreement.hpp"
#include "transport/uniform.hpp"

namespace deep_ep {

Topology agree_on_topology(Bootstrap& bootstrap) {
  const std::string own = bootstrap.host_id();
  std::vector<std::string> host_ids;
  for (const Bytes& id : bootstrap.all_gather(std::as_bytes(std::span(own)))) {
    host_ids.emplace_back(reinterpret_cast<const char*>(id.data()), id.size());
  }
  return topology_from_host_ids(bootstrap.rank_idx(), host_ids);
}

EPBufferOptions agree_on_options(Bootstrap& bootstrap, const EPBufferOptions& options,
                                 const Topology& logical) {
  EPBufferOptions checked;
  agree_on_success(bootstrap, error_of([&] { checked = check_options(options, logical); }));
  require_uniform(bootstrap,
                  {{"device", checked.cuda_device == kHostMemory ? "cpu" : "cuda"},
                   {"num_bytes", concat(checked.num_bytes)},
                   {"num_max_tokens_per_rank", concat(checked.num_max_tokens_per_rank)},
                   {"hidden", concat(checked.hidden)},
                   {"num_topk", concat(checked.num_topk)},
                   {"use_fp8_dispatch", concat(checked.use_fp8_dispatch)},
                   {"allow_hybrid_mode", concat(checked.allow_hybrid_mode)},
                   {"allow_multiple_reduction", concat(checked.allow_multiple_reduction)}});
  return checked;
}

std::chrono::nanoseconds wait_limit(const EPBufferOptions& options) {
  const std::chrono::duration<double> limit(std::min(options.timeout_secs, 1e9));
  return config::timeout_or(std::chrono::duration_cast<std::chrono::nanoseconds>(limit));
}

}  // namespace deep_ep
