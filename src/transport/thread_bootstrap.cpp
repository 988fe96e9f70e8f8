// Ranks that are threads of one process meet at a condition variable.
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>

#include "base/check.hpp"
#include "deep_ep/bootstrap.hpp"
#include "os/deadline.hpp"
#include "transport/rank_list.hpp"

namespace deep_ep {
namespace {

/// Where the threads meet, as often as they like. Once it fails it fails for all and for ever:
/// after that no rank can know which round another one is in.
class Rendezvous {
 public:
  using Messages = std::vector<Bytes>;

  Rendezvous(int num_ranks, std::chrono::nanoseconds timeout)
      : timeout_(timeout),
        arrived_(static_cast<std::size_t>(num_ranks)),
        has_left_(static_cast<std::size_t>(num_ranks)) {}

  Messages all_gather(int rank_idx, std::span<const std::byte> message) {
    const Deadline deadline(timeout_);
    std::unique_lock lock(mutex_);
    if (failure_) throw *failure_;
    std::optional<Bytes>& place = arrived_[static_cast<std::size_t>(rank_idx)];
    require(!place, "rank ", rank_idx, " is in all_gather already: one thread a rank");
    place.emplace(message.begin(), message.end());

    const std::uint64_t round = num_rounds_;
    if (missing_ranks().empty()) finish_round();
    while (num_rounds_ == round && !failure_) {
      const std::vector<int> missing = missing_ranks();
      const std::vector<int> left = those_that_left(missing);
      if (!left.empty()) {
        fail(ErrorCode::kPeer, concat(rank_list(left), " left the group before all_gather"));
      } else if (deadline.has_passed()) {
        fail(ErrorCode::kTimeout, concat(rank_list(missing), " did not come to all_gather within ",
                                         deadline.limit_text()));
      } else {
        changed_.wait_until(lock, deadline.at());
      }
    }
    if (failure_ && num_rounds_ == round) throw *failure_;
    // No later round has replaced it: that would have needed this rank.
    const std::shared_ptr<const Messages> result = result_;
    lock.unlock();
    return *result;
  }

  /// Rank `rank_idx` will not come again.
  void leave(int rank_idx) noexcept {
    const std::scoped_lock lock(mutex_);
    has_left_[static_cast<std::size_t>(rank_idx)] = true;
    changed_.notify_all();
  }

 private:
  std::vector<int> missing_ranks() const {
    std::vector<int> missing;
    for (std::size_t rank = 0; rank < arrived_.size(); ++rank) {
      if (!arrived_[rank]) missing.push_back(static_cast<int>(rank));
    }
    return missing;
  }

  std::vector<int> those_that_left(const std::vector<int>& ranks) const {
    std::vector<int> left;
    for (const int rank : ranks) {
      if (has_left_[static_cast<std::size_t>(rank)]) left.push_back(rank);
    }
    return left;
  }

  void finish_round() {
    auto messages = std::make_shared<Messages>();
    for (std::optional<Bytes>& message : arrived_) {
      messages->push_back(std::exchange(message, std::nullopt).value_or(Bytes{}));
    }
    result_ = std::move(messages);
    ++num_rounds_;
    changed_.notify_all();
  }

  void fail(ErrorCode code, const std::string& reason) {
    failure_ = Error(code, reason);
    changed_.notify_all();
  }

  const std::chrono::nanoseconds timeout_;
  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::vector<std::optional<Bytes>> arrived_;  ///< the messages of this round so far
  std::vector<bool> has_left_;
  std::uint64_t num_rounds_ = 0;  ///< finished ones
  std::shared_ptr<const Messages> result_;
  std::optional<Error> failure_;
};

class ThreadBootstrap final : public Bootstrap {
 public:
  ThreadBootstrap(int rank_idx, int num_ranks, std::string host_id,
                  std::shared_ptr<Rendezvous> rendezvous)
      : rank_idx_(rank_idx),
        num_ranks_(num_ranks),
        host_id_(std::move(host_id)),
        rendezvous_(std::move(rendezvous)) {}
  ThreadBootstrap(const ThreadBootstrap&) = delete;
  ThreadBootstrap& operator=(const ThreadBootstrap&) = delete;
  ~ThreadBootstrap() override { rendezvous_->leave(rank_idx_); }

  int rank_idx() const noexcept override { return rank_idx_; }
  int num_ranks() const noexcept override { return num_ranks_; }
  std::string host_id() const override { return host_id_; }

  std::vector<Bytes> all_gather(std::span<const std::byte> message) override {
    return rendezvous_->all_gather(rank_idx_, message);
  }

 private:
  int rank_idx_;
  int num_ranks_;
  std::string host_id_;
  std::shared_ptr<Rendezvous> rendezvous_;
};

}  // namespace

std::vector<std::shared_ptr<Bootstrap>> make_thread_bootstraps(int num_ranks,
                                                               std::chrono::nanoseconds timeout,
                                                               std::vector<std::string> host_ids) {
  require(num_ranks >= 1, "num_ranks must be at least 1, got ", num_ranks);
  const auto num_ends = static_cast<std::size_t>(num_ranks);
  require(host_ids.empty() || host_ids.size() == num_ends,
          "host_ids must be empty or name the host of each of the ", num_ranks, " ranks, got ",
          host_ids.size());
  if (host_ids.empty()) host_ids.assign(num_ends, default_host_id());
  const auto rendezvous = std::make_shared<Rendezvous>(num_ranks, timeout);
  std::vector<std::shared_ptr<Bootstrap>> ends;
  ends.reserve(num_ends);
  for (int rank = 0; rank < num_ranks; ++rank) {
    ends.push_back(std::make_shared<ThreadBootstrap>(
        rank, num_ranks, host_ids[static_cast<std::size_t>(rank)], rendezvous));
  }
  return ends;
}

}  // namespace deep_ep
