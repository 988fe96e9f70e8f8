#pragma once
// What kernels tell the host, and what the host makes of it.
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "backends/cuda/device.hpp"
#include "deep_ep/abi/ep_params.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/topology.hpp"
#include "transport/peer_link.hpp"

namespace deep_ep::cuda {

class Status {
 public:
  /// Memory of the host that kernels on `device` can write.
  Status(std::shared_ptr<const Device> device, const Topology& topology,
         std::chrono::nanoseconds timeout);
  ~Status();
  Status(const Status&) = delete;
  Status& operator=(const Status&) = delete;

  /// Fills in what kernels need to find it.
  void describe(abi::Context& context) const;
  std::int32_t* device_expert_counts() const;  ///< as kernels address it

  /// Throws what ended the use of the buffer, if anything did.
  void throw_if_broken() const;

  /// Throws, once each, why the ranks gave up a call that they disagreed on.
  void throw_if_disagreed();

  /// What this rank receives in the call with `ticket`. Blocks; throws as the two above, and
  /// kTimeout.
  struct Counts {
    std::int64_t num_tokens = 0;
    std::int64_t num_aligned_rows = 0;
    std::vector<std::int64_t> of_experts;  ///< `[L]`, unaligned
  };
  Counts wait_for_counts(std::uint64_t ticket, int num_local_experts,
                         const std::vector<PeerLink>& links);

  /// Blocks until `event` is reached. Throws as above.
  void wait_for(CUevent event, const std::vector<PeerLink>& links);

  /// Ends the use of the buffer for a reason that the host found.
  void break_off(const Error& error);

 private:
  const abi::HostStatus& host() const { return *host_; }
  Error fault_error() const;
  std::string prefix(std::uint64_t call) const;
  void abort_if_peer_died(const std::vector<PeerLink>& links);

  std::shared_ptr<const Device> device_;
  Topology topology_;
  std::chrono::nanoseconds timeout_;
  abi::HostStatus* host_ = nullptr;
  std::int32_t* expert_counts_ = nullptr;
  abi::Announcement* announcements_ = nullptr;
  CUdeviceptr device_address_ = 0;
  mutable std::mutex mutex_;
  std::uint64_t reported_problem_ = 0;
  std::optional<Error> broken_;
  std::string dead_ranks_;
};

}  // namespace deep_ep::cuda
