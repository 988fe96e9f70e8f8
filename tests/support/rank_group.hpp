#pragma once
// N ranks as threads of the test: runs the same body on each and gathers which rank failed, and
// how.
#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::testing {

/// The exception that ended a rank.
struct RankFailure {
  int rank_idx = 0;
  ErrorCode code = ErrorCode::kInternal;  ///< of an Error; kInternal for all other exceptions
  std::string what;

  friend std::ostream& operator<<(std::ostream& out, const RankFailure& failure) {
    return out << "rank " << failure.rank_idx << ": " << failure.what;
  }
};

struct RankGroup {
  int num_ranks = 1;
  std::vector<std::string> host_ids;  ///< empty: all on one host
  std::chrono::nanoseconds timeout = std::chrono::seconds(20);
};

/// `num_scaleout_ranks` logical hosts of `num_scaleup_ranks` ranks each.
inline RankGroup make_rank_group(int num_scaleout_ranks, int num_scaleup_ranks) {
  RankGroup group{.num_ranks = num_scaleout_ranks * num_scaleup_ranks, .host_ids = {}};
  for (int rank_idx = 0; rank_idx < group.num_ranks; ++rank_idx) {
    group.host_ids.push_back("host" + std::to_string(rank_idx / num_scaleup_ranks));
  }
  return group;
}

/// Runs `body` on one thread a rank and joins them all. A rank that throws gives up its bootstrap,
/// so that its peers need not wait for it. Returns the failures in rank order.
inline std::vector<RankFailure> run_ranks(
    const RankGroup& group, const std::function<void(std::shared_ptr<Bootstrap>)>& body) {
  auto bootstraps = make_thread_bootstraps(group.num_ranks, group.timeout, group.host_ids);
  std::vector<std::vector<RankFailure>> failures_of_rank(bootstraps.size());
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < bootstraps.size(); ++i) {
      threads.emplace_back([&body, &failures = failures_of_rank[i],
                            bootstrap = std::exchange(bootstraps[i], nullptr)]() mutable {
        const int rank_idx = bootstrap->rank_idx();
        try {
          body(std::move(bootstrap));
        } catch (const Error& error) {
          failures.push_back({rank_idx, error.code(), error.what()});
        } catch (const std::exception& error) {
          failures.push_back({rank_idx, ErrorCode::kInternal, error.what()});
        }
      });
    }
  }
  std::vector<RankFailure> failures;
  for (const auto& of_rank : failures_of_rank) {
    failures.insert(failures.end(), of_rank.begin(), of_rank.end());
  }
  return failures;
}

}  // namespace deep_ep::testing
