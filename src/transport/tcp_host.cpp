// Rank 0's part of a TCP meeting: receives everybody at once and lets those in who belong to the
// group.
#include <array>
#include <cerrno>
#include <chrono>
#include <exception>
#include <memory>
#include <utility>

#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/read.hpp>
#include <asio/steady_timer.hpp>

#include "base/check.hpp"
#include "os/socket.hpp"
#include "transport/frame.hpp"
#include "transport/hello.hpp"
#include "transport/rank_list.hpp"
#include "transport/tcp_endpoint.hpp"
#include "transport/tcp_meeting.hpp"

namespace deep_ep {
namespace {

using asio::ip::tcp;

/// A rank sends its hello at once; a stranger that sends nothing keeps a descriptor no longer than
/// this.
constexpr std::chrono::seconds kVisitorLimit{5};

/// An answer fits into the send buffer; this bounds the wait for a client that has none free.
constexpr std::chrono::seconds kAnswerLimit{1};

/// One that has connected and not yet shown who it is.
struct Visitor {
  explicit Visitor(tcp::socket connected)
      : socket(std::move(connected)), timer(socket.get_executor(), kVisitorLimit) {}

  tcp::socket socket;
  asio::steady_timer timer;
  std::array<std::byte, kHelloBytes> hello{};
};

class Reception {
 public:
  Reception(int num_ranks, const MeetingPlace& place)
      : num_ranks_(num_ranks), connections_(static_cast<std::size_t>(num_ranks)), acceptor_(io_) {
    listen(place);
  }

  /// Receives until all ranks are there or the deadline has passed.
  std::vector<UniqueFd> run(const Deadline& deadline) {
    accept_next();
    std::vector<int> missing = missing_ranks();
    while (!missing.empty() && !deadline.has_passed()) {
      io_.restart();
      io_.run_until(deadline.at());
      missing = missing_ranks();  // again: one may have left since admit() stopped the wait
    }
    if (missing.empty()) {
      answer_all([](int fd, const Deadline& limit) { send_frame(fd, {}, limit); });
      return std::move(connections_);
    }
    const std::string hint =
        last_refusal_.empty() ? "" : concat("; the last one refused: ", last_refusal_);
    const Error error(ErrorCode::kTimeout,
                      concat(rank_list(missing), " did not come to rank 0 at ", place_text_,
                             " within ", deadline.limit_text(), hint));
    answer_all([&](int fd, const Deadline& limit) { send_error_frame(fd, error, limit); });
    throw error;
  }

 private:
  void listen(const MeetingPlace& place) {
    place_text_ = place_text(place);
    std::error_code error;
    const std::vector<tcp::endpoint> endpoints = resolve(io_, place, error);
    require(!endpoints.empty(), "resolve ", place.address, ": ", network_error_text(error));
    acceptor_.open(endpoints.front().protocol(), error);
    // else the port stays taken for a minute after the last group that met here
    if (!error) acceptor_.set_option(tcp::acceptor::reuse_address(true), error);
    if (!error) acceptor_.bind(endpoints.front(), error);
    if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
    require(error.value() != EADDRNOTAVAIL,
            "rank 0 must listen at an address of its own host: bind ", place_text_, ": ",
            network_error_text(error));
    if (error) {
      throw Error(ErrorCode::kSystem,
                  concat("listen at ", place_text_, ": ", network_error_text(error)));
    }
  }

  void accept_next() {
    acceptor_.async_accept([this](const std::error_code& error, tcp::socket socket) {
      if (!error) receive(std::make_shared<Visitor>(std::move(socket)));
      if (!error || error == asio::error::connection_aborted) return accept_next();
      // out of descriptors, most likely: some come free when strangers run out of time
      retry_timer_.expires_after(std::chrono::milliseconds(100));
      retry_timer_.async_wait([this](const std::error_code&) { accept_next(); });
    });
  }

  void receive(const std::shared_ptr<Visitor>& visitor) {
    visitor->timer.async_wait([visitor](const std::error_code& error) {
      std::error_code ignored;
      if (!error) visitor->socket.close(ignored);  // ends the read below
    });
    asio::async_read(visitor->socket, asio::buffer(visitor->hello),
                     [this, visitor](const std::error_code& error, std::size_t) {
                       visitor->timer.cancel();
                       if (!error) admit(*visitor);
                     });
  }

  void admit(Visitor& visitor) {
    std::error_code error;
    const std::string from = endpoint_text(visitor.socket.remote_endpoint(error));
    UniqueFd connection = take_descriptor(visitor.socket, error);
    if (error) return;  // it is gone already
    try {
      const Hello hello = parse_hello(visitor.hello, num_ranks_, Id128{});
      require(hello.rank_idx != 0, "rank 0 is here already");
      UniqueFd& place = connections_[static_cast<std::size_t>(hello.rank_idx)];
      // a rank that gave up and was started again takes the place of its earlier self
      require(!place || has_hung_up(place.get()), "rank ", hello.rank_idx, " is here already");
      place = std::move(connection);
    } catch (const Error& refusal) {
      last_refusal_ = concat(from, ": ", refusal.what());
      answer(connection,
             [&](int fd, const Deadline& limit) { send_error_frame(fd, refusal, limit); });
    }
    if (missing_ranks().empty()) io_.stop();
  }

  std::vector<int> missing_ranks() {
    std::vector<int> missing;
    for (int rank = 1; rank < num_ranks_; ++rank) {
      UniqueFd& connection = connections_[static_cast<std::size_t>(rank)];
      if (connection && has_hung_up(connection.get())) connection.reset();
      if (!connection) missing.push_back(rank);
    }
    return missing;
  }

  /// Whoever cannot be answered has left, which the next use of the connection will show.
  template <typename Send>
  static void answer(const UniqueFd& connection, const Send& send) noexcept {
    try {
      if (connection) send(connection.get(), Deadline(kAnswerLimit));
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): see above
    }
  }

  template <typename Send>
  void answer_all(const Send& send) noexcept {
    for (const UniqueFd& connection : connections_) answer(connection, send);
  }

  int num_ranks_;
  std::string place_text_;
  std::vector<UniqueFd> connections_;
  std::string last_refusal_;
  asio::io_context io_{1};
  tcp::acceptor acceptor_;
  asio::steady_timer retry_timer_{io_};
};

}  // namespace

std::vector<UniqueFd> host_meeting(int num_ranks, const MeetingPlace& place,
                                   const Deadline& deadline) {
  return Reception(num_ranks, place).run(deadline);
}

}  // namespace deep_ep
