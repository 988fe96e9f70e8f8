// Ranks on any hosts gather through rank 0, to which each has a TCP connection.
#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "base/check.hpp"
#include "deep_ep/bootstrap.hpp"
#include "os/socket.hpp"
#include "transport/frame.hpp"
#include "transport/rank_list.hpp"
#include "transport/tcp_meeting.hpp"
#include "transport/wire.hpp"

namespace deep_ep {
namespace {

/// How long rank 0 tries to tell another rank that the group has failed.
constexpr std::chrono::seconds kFarewellLimit{1};

class TcpBootstrap final : public Bootstrap {
 public:
  TcpBootstrap(int rank_idx, std::vector<UniqueFd> connections, int num_ranks,
               std::chrono::nanoseconds timeout, std::string host_id)
      : rank_idx_(rank_idx),
        num_ranks_(num_ranks),
        timeout_(timeout),
        host_id_(std::move(host_id)),
        connections_(std::move(connections)) {}

  int rank_idx() const noexcept override { return rank_idx_; }
  int num_ranks() const noexcept override { return num_ranks_; }
  std::string host_id() const override { return host_id_; }

  std::vector<Bytes> all_gather(std::span<const std::byte> message) override {
    require(message.size() <= kMaxMessageBytes, "a message must have at most ", kMaxMessageBytes,
            " bytes, got ", message.size());
    if (failure_) throw *failure_;
    try {
      return rank_idx_ == 0 ? gather_and_answer(message) : ask_rank_0(message);
    } catch (const Error& error) {
      // Some ranks may have finished this round and some not: no later one can be trusted. The
      // closed connections tell those who have not noticed.
      failure_ = error;
      connections_.clear();
      throw;
    }
  }

 private:
  int connection_of(int rank) const { return connections_[static_cast<std::size_t>(rank)].get(); }

  std::vector<Bytes> gather_and_answer(std::span<const std::byte> message) {
    const Deadline deadline(timeout_);
    try {
      std::vector<Bytes> messages = receive_all(message, deadline);
      WireWriter answer;
      for (const Bytes& each : messages) answer.put_bytes(each);
      for (int rank = 1; rank < num_ranks_; ++rank) {
        name_rank(rank, [&] { send_frame(connection_of(rank), answer.bytes(), deadline); });
      }
      return messages;
    } catch (const Error& error) {
      for (int rank = 1; rank < num_ranks_; ++rank) {
        try {
          send_error_frame(connection_of(rank), error, Deadline(kFarewellLimit));
        } catch (
            const Error&) {  // NOLINT(bugprone-empty-catch): this one has left, tell the others
        }
      }
      throw;
    }
  }

  /// In whatever order they come, so that a rank that died is noticed while others are still
  /// awaited.
  std::vector<Bytes> receive_all(std::span<const std::byte> own, const Deadline& deadline) {
    std::vector<Bytes> messages(static_cast<std::size_t>(num_ranks_));
    messages[0].assign(own.begin(), own.end());
    std::vector<int> awaited(static_cast<std::size_t>(num_ranks_ - 1));
    std::iota(awaited.begin(), awaited.end(), 1);
    while (!awaited.empty()) {
      std::vector<int> sockets(awaited.size());
      std::ranges::transform(awaited, sockets.begin(),
                             [&](int rank) { return connection_of(rank); });
      const std::vector<std::size_t> ready = wait_readable(sockets, deadline);
      if (ready.empty()) {
        throw Error(ErrorCode::kTimeout,
                    concat(rank_list(awaited), " did not come to all_gather within ",
                           deadline.limit_text()));
      }
      std::vector<int> received;
      for (const std::size_t i : ready) {
        const int rank = awaited[i];
        name_rank(rank, [&] {
          Frame frame = recv_frame(sockets[i], kMaxMessageBytes, deadline);
          if (frame.error) throw *frame.error;
          messages[static_cast<std::size_t>(rank)] = std::move(frame.payload);
        });
        received.push_back(rank);
      }
      std::erase_if(awaited, [&](int rank) { return std::ranges::count(received, rank) > 0; });
    }
    return messages;
  }

  std::vector<Bytes> ask_rank_0(std::span<const std::byte> message) {
    const Deadline deadline(timeout_);
    const int connection = connection_of(0);
    Frame answer;
    name_rank(0, [&] {
      send_frame(connection, message, deadline);
      const std::size_t max_bytes = (kMaxMessageBytes + 8) * static_cast<std::size_t>(num_ranks_);
      answer = recv_frame(connection, max_bytes, deadline.later_by(kAnswerGrace));
    });
    if (answer.error) throw *answer.error;
    WireReader reader(answer.payload);
    std::vector<Bytes> messages(static_cast<std::size_t>(num_ranks_));
    for (Bytes& each : messages) each = reader.take_bytes();
    reader.require_end();
    return messages;
  }

  /// Adds to an Error of `action` which rank is at the other end.
  template <typename Action>
  static void name_rank(int rank, const Action& action) {
    try {
      action();
    } catch (const Error& error) {
      throw Error(error.code(), concat("all_gather with rank ", rank, ": ", error.what()));
    }
  }

  int rank_idx_;
  int num_ranks_;
  std::chrono::nanoseconds timeout_;
  std::string host_id_;
  std::vector<UniqueFd> connections_;  ///< of rank 0: to each rank; of the others: one, to rank 0
  std::optional<Error> failure_;
};

}  // namespace

std::shared_ptr<Bootstrap> make_tcp_bootstrap(int rank_idx, int num_ranks,
                                              const std::string& address, int port,
                                              std::chrono::nanoseconds timeout,
                                              std::string host_id) {
  require(num_ranks >= 1, "num_ranks must be at least 1, got ", num_ranks);
  require(rank_idx >= 0 && rank_idx < num_ranks, "rank must be in [0, ", num_ranks, "), got ",
          rank_idx);
  require(!address.empty(), "address must name the host of rank 0, got none");
  require(port >= 1 && port <= 65535, "port must be in [1, 65535], got ", port);

  const MeetingPlace place{.address = address, .port = port};
  const Deadline deadline(timeout);
  std::vector<UniqueFd> connections;
  if (num_ranks > 1 && rank_idx == 0) connections = host_meeting(num_ranks, place, deadline);
  if (rank_idx > 0) connections.push_back(join_meeting(rank_idx, num_ranks, place, deadline));
  return std::make_shared<TcpBootstrap>(rank_idx, std::move(connections), num_ranks, timeout,
                                        std::move(host_id));
}

}  // namespace deep_ep
