#pragma once
// How rows get to ranks whose windows this rank cannot address: one-sided writes and signals.
//
// A row between domains goes to the rank at the same place of the other domain and on from there.
// What carries it is behind this interface; the only assumption is that a signal overtakes no
// earlier write.
#include <cstdint>

#include "backends/cpu/ranks.hpp"

namespace deep_ep::cpu {

class Network {
 public:
  virtual ~Network() = default;

  /// Writes into the window of `rank_idx`. `source` may be reused on return. Several threads may
  /// write.
  virtual void put(int rank_idx, std::int64_t window_offset, const void* source,
                   std::int64_t num_bytes) = 0;

  /// Sets a signal in the inbox that `rank_idx` keeps for this rank's domain, after all writes to
  /// that rank that returned before.
  virtual void signal(int rank_idx, NetworkSignal signal, std::uint64_t call) = 0;
};

/// Domains on one machine, as `EP_HOST_ID` makes them: the "network" is the shared memory.
class LoopbackNetwork : public Network {
 public:
  explicit LoopbackNetwork(const Ranks& ranks) : ranks_(ranks) {}
  void put(int rank_idx, std::int64_t window_offset, const void* source,
           std::int64_t num_bytes) override;
  void signal(int rank_idx, NetworkSignal signal, std::uint64_t call) override;

 private:
  const Ranks& ranks_;
};

}  // namespace deep_ep::cpu
