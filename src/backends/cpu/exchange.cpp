#include "backends/cpu/exchange.hpp"

#include "base/check.hpp"

namespace deep_ep::cpu {

namespace {

// Sends the message to the rank at the same place of each other domain, and collects theirs.
void exchange_between_domains(Ranks& ranks, Network& network, const CallId& call,
                              std::int64_t num_bytes) {
  const Topology& topology = ranks.topology();
  const int own_node = topology.scaleout_rank_idx();
  const Window& own = *ranks.own();
  for (int node = 0; node < topology.num_scaleout_ranks; ++node) {
    if (node == own_node) continue;
    const int peer = topology.rank_at(node, topology.scaleup_rank_idx());
    network.put(peer, own.layout().inbox_message(own_node, call.number),
                own.message(call.number).data(), num_bytes);
    network.signal(peer, NetworkSignal::kAnnounced, call.number);
  }
  ranks.wait_for_network(call, NetworkSignal::kAnnounced);
  ranks.post_stage(call, Stage::kRelayed);
}

// Where this rank finds the message of `rank_idx`: with the rank itself, or with the one it was
// sent to.
std::span<const std::byte> message_of(const Ranks& ranks, const CallId& call, int rank_idx) {
  const Topology& topology = ranks.topology();
  const int node = rank_idx / topology.num_scaleup_ranks;
  const int place = rank_idx % topology.num_scaleup_ranks;
  const Window& window = ranks.window(topology.rank_at(topology.scaleout_rank_idx(), place));
  return node == topology.scaleout_rank_idx() ? window.message(call.number)
                                              : window.inbox_message(node, call.number);
}

}  // namespace

std::vector<CallHeader> exchange(Ranks& ranks, Network& network, const CallId& call,
                                 CallHeader header, std::span<const std::int32_t> counts,
                                 CountMatrix* matrix) {
  header.call = call.number;
  header.num_counts = static_cast<std::int64_t>(counts.size());
  write_message(ranks.own()->message(call.number), header, counts);
  ranks.post_stage(call, Stage::kAnnounced);
  const bool is_hybrid = ranks.topology().is_hybrid();
  if (is_hybrid) {
    const auto num_bytes = static_cast<std::int64_t>(sizeof(CallHeader) + counts.size_bytes());
    exchange_between_domains(ranks, network, call, num_bytes);
  }
  ranks.wait_for_stage(call, is_hybrid ? Stage::kRelayed : Stage::kAnnounced);

  std::vector<CallHeader> headers;
  for (int rank = 0; rank < ranks.topology().num_ranks; ++rank) {
    headers.push_back(read_header(message_of(ranks, call, rank), call.number, rank));
  }
  if (const auto problem = find_problem(headers)) {
    throw CallRefused(problem->is_refusal ? ErrorCode::kPeer : ErrorCode::kInvalidArgument,
                      concat(call.operation, " (call ", call.number, "): ", problem->text));
  }
  if (matrix != nullptr) {
    for (int rank = 0; rank < ranks.topology().num_ranks; ++rank) {
      read_counts(message_of(ranks, call, rank), headers[static_cast<std::size_t>(rank)],
                  matrix->shape(), rank, matrix->values_of(rank));
    }
  }
  return headers;
}

}  // namespace deep_ep::cpu
