#include "backends/cpu/ep_call.hpp"

#include <cstddef>
#include <utility>

#include "base/check.hpp"

namespace deep_ep::cpu {

namespace {

std::size_t landing_slot(const CallContext& context) {
  return static_cast<std::size_t>(WindowLayout::slot(context.id.number));
}

}  // namespace

std::shared_ptr<const EPRouting> routing_of(const EPHandle& handle) {
  require(handle.routing != nullptr, "the dispatch that made the handle failed");
  return std::static_pointer_cast<const EPRouting>(handle.routing);
}

void offer_landing(const CallContext& context, int node, std::int64_t window_offset) {
  const Topology& topology = context.ranks.topology();
  const int peer = rail_peer(topology, node);
  const std::int64_t word =
      context.ranks.own()->layout().inbox(topology.scaleout_rank_idx()) +
      static_cast<std::int64_t>(offsetof(Inbox, landing_offset) + 8 * landing_slot(context));
  context.network.put(peer, word, &window_offset, sizeof(window_offset));
  context.network.signal(peer, NetworkSignal::kOffered, context.id.number);
}

std::int64_t landing_at(const CallContext& context, int node) {
  return context.ranks.own()->inbox(node).landing_offset[landing_slot(context)];
}

Tensor make_private_tensor(TensorView shape) {
  const auto num_bytes = static_cast<std::size_t>(shape.num_bytes());
  std::shared_ptr<std::byte[]> storage(new std::byte[num_bytes == 0 ? 1 : num_bytes]());
  shape.data = storage.get();
  return {shape, std::shared_ptr<void>(storage, storage.get())};
}

}  // namespace deep_ep::cpu
