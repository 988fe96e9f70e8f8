#pragma once
// What dispatch and combine have in common: the things they work with, and a dispatch's routing.
#include <memory>
#include <vector>

#include "backends/arena.hpp"
#include "backends/cpu/exchange.hpp"
#include "backends/cpu/network.hpp"
#include "backends/cpu/ranks.hpp"
#include "backends/cpu/workers.hpp"
#include "core/ep_routing.hpp"

namespace deep_ep::cpu {

/// Tokens a worker takes at a time: enough to pay for taking them, few enough to share 128 tokens.
inline constexpr std::int64_t kTokenGrain = 16;

/// What a call runs with, on the thread of its turn.
struct CallContext {
  Ranks& ranks;
  Network& network;
  Arena& arena;
  Workers& workers;
  CallId id;
};

/// Tokens of a rank of another domain that came through this rank.
struct ForwardedTokens {
  int source = -1;
  Routing routing;                      ///< lanes on this domain only
  std::vector<std::int32_t> token_ids;  ///< index of each token on its source
};

/// The ways of all tokens that one dispatch moved through this rank. Immutable once the dispatch is
/// done.
struct EPRouting {
  RoutingShape shape;
  ReceiveCounts received;
  Routing own;  ///< of this rank's tokens
  std::vector<std::int32_t>
      node_slot;  ///< `[T, domains]`: place among the tokens sent there, or -1
  std::vector<std::int64_t> num_to_node;   ///< tokens sent to each domain
  std::vector<ForwardedTokens> forwarded;  ///< one a domain; empty for the own one

  std::int32_t slot(std::int64_t token, int node) const {
    return node_slot[static_cast<std::size_t>(token * shape.topology.num_scaleout_ranks + node)];
  }
};

/// The routing behind a handle. Throws kInvalidArgument if its dispatch failed.
std::shared_ptr<const EPRouting> routing_of(const EPHandle& handle);

/// The rank at this rank's place in another domain.
inline int rail_peer(const Topology& topology, int node) {
  return topology.rank_at(node, topology.scaleup_rank_idx());
}

/// Tells the rank at this place of domain `node` where its rows of this call may land in this
/// window.
void offer_landing(const CallContext& context, int node, std::int64_t window_offset);

/// Where this rank's rows of this call may land in the window of its peer in domain `node`; valid
/// after NetworkSignal::kOffered.
std::int64_t landing_at(const CallContext& context, int node);

/// A tensor in private memory, zero-filled.
Tensor make_private_tensor(TensorView shape);

}  // namespace deep_ep::cpu
