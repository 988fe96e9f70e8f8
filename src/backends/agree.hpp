#pragma once
// What all ranks find out together before any backend makes its window.
#include <chrono>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/ep_buffer.hpp"

namespace deep_ep {

/// Collective. Which ranks share a host.
Topology agree_on_topology(Bootstrap& bootstrap);

/// Collective. The options with what they leave open. Throws on all ranks what is wrong on one of
/// them, or which ranks differ in what.
EPBufferOptions agree_on_options(Bootstrap& bootstrap, const EPBufferOptions& options,
                                 const Topology& logical);

/// Limit of a wait for another rank.
std::chrono::nanoseconds wait_limit(const EPBufferOptions& options);

}  // namespace deep_ep
