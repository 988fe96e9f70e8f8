#pragma once
// The beginning of every call: all ranks say what they want and learn what the others want.
#include <span>
#include <vector>

#include "backends/cpu/network.hpp"
#include "backends/cpu/ranks.hpp"
#include "core/call_message.hpp"

namespace deep_ep::cpu {

/// A call that ended for all ranks before anything moved; the buffer stays usable.
class CallRefused : public Error {
 public:
  using Error::Error;
};

/// Publishes `header` and `counts` (may be empty) and waits for those of all ranks. Returns all
/// headers; fills `matrix` unless null. Throws CallRefused, the same on every rank, when the ranks
/// do not agree.
std::vector<CallHeader> exchange(Ranks& ranks, Network& network, const CallId& call,
                                 CallHeader header, std::span<const std::int32_t> counts,
                                 CountMatrix* matrix);

}  // namespace deep_ep::cpu
