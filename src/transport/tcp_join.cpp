// The part of the ranks above 0 in a TCP meeting: find rank 0, say hello, wait to be let in.
#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>

#include "base/check.hpp"
#include "os/socket.hpp"
#include "transport/frame.hpp"
#include "transport/hello.hpp"
#include "transport/tcp_endpoint.hpp"
#include "transport/tcp_meeting.hpp"

namespace deep_ep {
namespace {

using asio::ip::tcp;

constexpr std::chrono::milliseconds kRetryPause{50};

/// One attempt; a host that swallows packets must not take the time of the other addresses.
constexpr std::chrono::seconds kConnectLimit{5};

/// Connects to the first endpoint that answers. Throws kInvalidArgument if the name has no address,
/// kPeer if nobody answers.
UniqueFd connect_tcp(const MeetingPlace& place, const Deadline& deadline) {
  asio::io_context io(1);
  std::error_code error;
  const std::vector<tcp::endpoint> endpoints = resolve(io, place, error);
  require(!endpoints.empty(), "resolve ", place.address, ": ", network_error_text(error));
  for (const tcp::endpoint& endpoint : endpoints) {
    tcp::socket socket(io);
    std::optional<std::error_code> result;
    socket.async_connect(endpoint, [&](const std::error_code& outcome) { result = outcome; });
    io.restart();
    io.run_until(deadline.at_most(kConnectLimit).at());
    if (!result) {
      socket.close(error);
      io.run();  // hands the aborted attempt to its handler before `result` goes away
      error = asio::error::timed_out;
      continue;
    }
    error = *result;
    if (error) continue;
    // Without a listener at a local port, a socket can be given that very port and connect to
    // itself.
    if (socket.local_endpoint(error) == socket.remote_endpoint(error)) {
      error = asio::error::connection_refused;
      continue;
    }
    UniqueFd connection = take_descriptor(socket, error);
    if (!error) return connection;
  }
  throw Error(ErrorCode::kPeer,
              concat("connect ", place_text(place), ": ", network_error_text(error)));
}

/// One attempt: connects, says hello, waits for the answer. Gives the connection and rank 0's
/// refusal. Throws kPeer or kSystem if the connection broke, kInvalidArgument if rank 0 is none.
std::pair<UniqueFd, std::optional<Error>> ask_to_join(const Hello& hello, const MeetingPlace& place,
                                                      const Deadline& deadline) {
  UniqueFd connection = connect_tcp(place, deadline);
  send_bytes(connection.get(), encode_hello(hello), deadline);
  Frame answer = recv_frame(connection.get(), 0, deadline.later_by(kAnswerGrace));
  return {std::move(connection), std::move(answer.error)};
}

}  // namespace

UniqueFd join_meeting(int rank_idx, int num_ranks, const MeetingPlace& place,
                      const Deadline& deadline) {
  const Hello hello{.rank_idx = rank_idx, .num_ranks = num_ranks};
  // Nothing that goes wrong before rank 0 has answered is final: it may not have started yet, nor
  // its name be known, nor the port be free of who had it before.
  for (;;) {
    std::optional<Error> obstacle;
    try {
      auto [connection, refusal] = ask_to_join(hello, place, deadline);
      if (!refusal) return std::move(connection);
      obstacle = std::move(refusal);
    } catch (const Error& error) {
      std::this_thread::sleep_for(
          std::min<std::chrono::nanoseconds>(kRetryPause, deadline.remaining()));
      // after the pause: an attempt that has no time left would report just that, not what is wrong
      if (!deadline.has_passed()) continue;
      const ErrorCode code =
          error.code() == ErrorCode::kInvalidArgument ? error.code() : ErrorCode::kTimeout;
      obstacle =
          Error(code, concat("not let in within ", deadline.limit_text(), ": ", error.what()));
    }
    throw Error(obstacle->code(), concat("rank ", rank_idx, " cannot join rank 0 at ",
                                         place_text(place), ": ", obstacle->what()));
  }
}

}  // namespace deep_ep
