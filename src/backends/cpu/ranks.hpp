#pragma once
// The ranks of a buffer as one of them sees them: their windows, how far they are, and whether they
// live.
#include <atomic>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "backends/cpu/signal.hpp"
#include "backends/cpu/window.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"
#include "transport/peer_exchange.hpp"

namespace deep_ep::cpu {

/// Which call a wait belongs to, for messages.
struct CallId {
  std::uint64_t number = 0;
  const char* operation = "";
};

class Ranks {
 public:
  /// Collective: makes this rank's window and exchanges it with all others.
  Ranks(Bootstrap& bootstrap, const Topology& logical, std::int64_t num_window_bytes,
        std::chrono::nanoseconds timeout);

  const Topology& topology() const noexcept { return topology_; }
  const std::shared_ptr<Window>& own() const noexcept {
    return windows_[static_cast<std::size_t>(topology_.rank_idx)];
  }
  Window& window(int rank_idx) const noexcept {
    return *windows_[static_cast<std::size_t>(rank_idx)];
  }

  /// The ranks of this rank's domain: [first, last).
  int first_of_domain() const noexcept {
    return topology_.rank_at(topology_.scaleout_rank_idx(), 0);
  }
  int last_of_domain() const noexcept { return first_of_domain() + topology_.num_scaleup_ranks; }

  /// Tells the domain that this rank has come to `stage` of the call.
  void post_stage(const CallId& call, Stage stage);

  /// Waits until every rank of the domain has come to `stage` of the call.
  /// Throws kTimeout or kPeer that names operation, call and ranks; see also abandon_waits().
  void wait_for_stage(const CallId& call, Stage stage);

  /// Waits until every other domain's rank at this place has set `signal` for the call. Throws
  /// likewise.
  void wait_for_network(const CallId& call, NetworkSignal signal);

  /// Makes waits that allow it end with kPeer, now and later; another thread may call it.
  void abandon_waits() noexcept { is_abandoned_.store(true); }
  void allow_abandoning(bool allow) noexcept { may_abandon_ = allow; }

  /// Says to the peers that this rank makes no more calls, and why.
  void leave(ErrorCode code, const std::string& farewell) noexcept;

  const WaitPolicy& wait_policy() const noexcept { return policy_; }
  int num_ranks_on_host() const noexcept { return static_cast<int>(links_.size()); }

 private:
  // One word to wait for, of rank `rank_idx`.
  struct Awaited {
    int rank_idx;
    Signal* signal;
  };
  void wait_for(const CallId& call, const std::vector<Awaited>& awaited, std::uint64_t target);
  void throw_if_gone(const CallId& call, const std::vector<Awaited>& awaited,
                     std::uint64_t target) const;
  [[noreturn]] void throw_timeout(const CallId& call, const std::vector<Awaited>& awaited,
                                  std::uint64_t target) const;
  std::string prefix(const CallId& call) const;
  void delay_on_purpose();

  Topology topology_;
  std::chrono::nanoseconds timeout_;
  WaitPolicy policy_;
  std::vector<PeerLink> links_;
  std::vector<std::shared_ptr<Window>> windows_;
  std::atomic<bool> is_abandoned_ = false;
  bool may_abandon_ = false;
  std::int64_t max_delay_us_ = 0;  // EP_TEST_DELAY_US
  std::minstd_rand random_;
};

}  // namespace deep_ep::cpu
