#pragma once
// How the ranks of a group find each other before they share any memory.
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace deep_ep {

using Bytes = std::vector<std::byte>;

/// One rank's end of a group. Used by one thread at a time; its functions are collective over the
/// group.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  virtual int rank_idx() const noexcept = 0;
  virtual int num_ranks() const noexcept = 0;

  /// What identifies the host of this rank; ranks with equal ids form one scale-up domain.
  virtual std::string host_id() const = 0;

  /// Gathers one message of each rank, in rank order; messages may differ in length. Blocks.
  /// Throws kTimeout that names the missing ranks where the implementation can tell them.
  virtual std::vector<Bytes> all_gather(std::span<const std::byte> message) = 0;
};

/// The identity of this machine: `EP_HOST_ID` if set (to split one machine into logical domains),
/// else the kernel's boot id.
std::string default_host_id();

/// Gathers through a function of the caller, e.g. one that asks a torch process group.
std::shared_ptr<Bootstrap> make_callback_bootstrap(
    int rank_idx, int num_ranks,
    std::function<std::vector<Bytes>(std::span<const std::byte>)> all_gather,
    std::string host_id = default_host_id());

/// `num_ranks` ends of a group whose ranks are threads of this process: give one to each thread.
/// `host_ids` is empty (one domain) or names the logical host of each rank.
std::vector<std::shared_ptr<Bootstrap>> make_thread_bootstraps(
    int num_ranks, std::chrono::nanoseconds timeout = std::chrono::seconds(300),
    std::vector<std::string> host_ids = {});

/// Meets at a TCP address where rank 0 listens. Blocks until all ranks have come.
/// Throws kTimeout naming the ranks that did not come, kInvalidArgument for a bad address or rank.
std::shared_ptr<Bootstrap> make_tcp_bootstrap(
    int rank_idx, int num_ranks, const std::string& address, int port,
    std::chrono::nanoseconds timeout = std::chrono::seconds(300),
    std::string host_id = default_host_id());

/// The same, with what `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` say.
/// Throws kInvalidArgument that names each variable that is missing or no number.
std::shared_ptr<Bootstrap> make_env_bootstrap(
    std::chrono::nanoseconds timeout = std::chrono::seconds(300));

}  // namespace deep_ep
