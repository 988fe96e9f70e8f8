#include "transport/peer_exchange.hpp"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "base/check.hpp"
#include "os/process.hpp"
#include "os/socket.hpp"
#include "transport/agreement.hpp"
#include "transport/hello.hpp"
#include "transport/introduction.hpp"
#include "transport/local_objects.hpp"
#include "transport/rank_list.hpp"

namespace deep_ep {
namespace {

/// A hello comes as one piece of a Unix socket: once its first byte is there, so are the others.
constexpr std::chrono::seconds kHelloLimit{1};

/// Adds to an Error of `action` which rank it was about.
template <typename Action>
void name_rank(int rank, const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    throw Error(error.code(), concat("link to rank ", rank, ": ", error.what()));
  }
}

/// Step 2 of the exchange, from the view of one rank.
///
/// Deadlock: a rank first does all that waits for nobody (connect and send, for which backlog and
/// socket buffers have room), then accepts, then reads the answers to what it has sent. So each
/// accept waits for the first part of another rank only, and each answer for its accepts only.
class Linker {
 public:
  Linker(int rank_idx, const std::vector<Introduction>& ranks, int own_descriptor, int listener,
         const Deadline& deadline)
      : rank_idx_(rank_idx),
        ranks_(ranks),
        own_descriptor_(own_descriptor),
        listener_(listener),
        deadline_(deadline),
        channels_(ranks.size()),
        links_(ranks.size()) {}

  std::vector<PeerLink> run() {
    for (int rank = 0; rank < num_ranks(); ++rank) {
      if (!is_same_process(rank)) continue;
      name_rank(rank,
                [&] { link(rank) = PeerLink(take_local_object(introduction(rank).object_key)); });
    }
    for (int rank = 0; rank < rank_idx_; ++rank) {
      if (!is_same_process(rank)) name_rank(rank, [&] { connect_to(rank); });
    }
    accept_higher_ranks();
    for (int rank = 0; rank < rank_idx_; ++rank) {
      if (!is_same_process(rank)) name_rank(rank, [&] { finish_with(rank); });
    }
    return std::move(links_);
  }

 private:
  int num_ranks() const { return static_cast<int>(ranks_.size()); }
  const Introduction& introduction(int rank) const {
    return ranks_[static_cast<std::size_t>(rank)];
  }
  UniqueFd& channel(int rank) { return channels_[static_cast<std::size_t>(rank)]; }
  PeerLink& link(int rank) { return links_[static_cast<std::size_t>(rank)]; }
  bool is_same_process(int rank) const {
    return introduction(rank).process == introduction(rank_idx_).process;
  }

  void send_hello_and_descriptor(int channel) const {
    const Hello hello{
        .rank_idx = rank_idx_, .num_ranks = num_ranks(), .token = introduction(0).token};
    send_bytes(channel, encode_hello(hello), deadline_);
    send_descriptor(channel, own_descriptor_, deadline_);
  }

  Hello recv_hello(int channel, const Deadline& deadline) const {
    std::array<std::byte, kHelloBytes> bytes{};
    recv_bytes(channel, bytes, deadline);
    return parse_hello(bytes, num_ranks(), introduction(0).token);
  }

  void connect_to(int rank) {
    channel(rank) = connect_unix(introduction(rank).socket_name, deadline_);
    send_hello_and_descriptor(channel(rank).get());
  }

  void finish_with(int rank) {
    const Hello hello = recv_hello(channel(rank).get(), deadline_);
    require(hello.rank_idx == rank, "rank ", hello.rank_idx, " answered");
    UniqueFd descriptor = recv_descriptor(channel(rank).get(), deadline_);
    link(rank) = PeerLink(std::move(descriptor), std::move(channel(rank)));
  }

  /// Serves whoever has something to say, so that a stranger that says nothing holds up nobody.
  void accept_higher_ranks() {
    std::vector<int> awaited;
    for (int rank = rank_idx_ + 1; rank < num_ranks(); ++rank) {
      if (!is_same_process(rank)) awaited.push_back(rank);
    }
    std::vector<UniqueFd> visitors;  // connected, not yet known
    while (!awaited.empty()) {
      std::vector<int> sockets{listener_};
      for (const UniqueFd& visitor : visitors) sockets.push_back(visitor.get());
      const std::vector<std::size_t> ready = wait_readable(sockets, deadline_);
      if (ready.empty()) {
        throw Error(ErrorCode::kTimeout,
                    concat(rank_list(awaited), " did not connect within ", deadline_.limit_text()));
      }
      for (const std::size_t i : ready) {
        if (i > 0) receive(std::move(visitors[i - 1]), awaited);
      }
      std::erase_if(visitors, [](const UniqueFd& visitor) { return !visitor; });
      if (ready.front() == 0) visitors.push_back(accept_unix(listener_, deadline_));
    }
  }

  /// Links to the visitor if it is one of the `awaited` ranks, else closes the connection.
  void receive(UniqueFd visitor, std::vector<int>& awaited) {
    int rank = -1;
    const std::optional<Error> refusal = error_of([&] {
      rank = recv_hello(visitor.get(), deadline_.at_most(kHelloLimit)).rank_idx;
      require(std::ranges::count(awaited, rank) > 0, "rank ", rank, " is not awaited");
    });
    if (refusal) return;  // a stranger: if a rank is behind it, that one sees its connection closed
    name_rank(rank, [&] {
      UniqueFd descriptor = recv_descriptor(visitor.get(), deadline_);
      send_hello_and_descriptor(visitor.get());
      link(rank) = PeerLink(std::move(descriptor), std::move(visitor));
    });
    std::erase(awaited, rank);
  }

  int rank_idx_;
  const std::vector<Introduction>& ranks_;
  int own_descriptor_;
  int listener_;
  Deadline deadline_;
  std::vector<UniqueFd> channels_;  ///< to lower ranks, until they have answered
  std::vector<PeerLink> links_;
};

}  // namespace

std::vector<PeerLink> exchange_peers(Bootstrap& bootstrap, int own_descriptor,
                                     std::shared_ptr<void> own_object,
                                     std::chrono::nanoseconds timeout) {
  Introduction own;
  UniqueFd listener;
  std::optional<LocalObjectOffer>
      offer;  // until all ranks have taken it, which the last step tells
  std::optional<Error> error = error_of([&] {
    own.process = process_identity();
    own.boot_id = boot_id();
    own.socket_name = concat("deep_ep.", hex(random_id()));
    own.token = random_id();
    own.has_descriptor = own_descriptor >= 0;
    // room for every rank, so that connecting waits for no accept
    listener = listen_unix(own.socket_name, bootstrap.num_ranks());
    own.object_key = offer.emplace(std::move(own_object)).key();
  });
  const std::vector<Introduction> ranks = introduce(bootstrap, own, error);

  std::vector<PeerLink> links;
  error = error_of([&] {
    links = Linker(bootstrap.rank_idx(), ranks, own_descriptor, listener.get(), Deadline(timeout))
                .run();
  });
  // Before the others are told: those that wait for this rank see it at once instead of running out
  // of time.
  if (error) listener.reset();
  agree_on_success(bootstrap, error);
  return links;
}

}  // namespace deep_ep
