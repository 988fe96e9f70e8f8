// Whatever a peer writes into a message slot: it is read, or refused with an Error.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/call_message.hpp"
#include "deep_ep/error.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace deep_ep;
  const std::span<const std::byte> message(reinterpret_cast<const std::byte*>(data), size);
  const RoutingShape shape{
      .topology = {.rank_idx = 0, .num_ranks = 4, .num_scaleout_ranks = 2, .num_scaleup_ranks = 2},
      .num_experts = 8,
      .num_topk = 2,
      .expert_alignment = 4,
      .do_expand = true};
  try {
    // The call number is what the reader expects: take it from the bytes so that more is reached.
    std::uint64_t call = 0;
    if (size >= sizeof call) std::memcpy(&call, data, sizeof call);
    const CallHeader header = read_header(message, call, 1);
    static_cast<void>(find_problem(std::vector<CallHeader>{header, CallHeader{}}));
    CountMatrix matrix(shape);
    read_counts(message, header, shape, 1, matrix.values_of(1));
    for (int rank = 0; rank < 4; ++rank) static_cast<void>(receive_counts(matrix, rank));
  } catch (const Error&) {
  }
  return 0;
}
