#pragma once
// What both sides of a TCP meeting need of Asio: addresses and readable errors.
#include <string>
#include <vector>

#include <asio/ip/tcp.hpp>

#include "os/fd.hpp"
#include "transport/tcp_meeting.hpp"

namespace deep_ep {

/// The place as messages give it: "10.0.0.1:29500", "[::1]:29500".
std::string place_text(const MeetingPlace& place);
std::string endpoint_text(const asio::ip::tcp::endpoint& endpoint);

/// "ECONNREFUSED (111)", or the text of an error that is no errno.
std::string network_error_text(const std::error_code& error);

/// Takes the descriptor out of Asio's hands, without delay for small messages and closed on exec: a
/// program that this one starts must not keep the connection open after its end. Empty, with
/// `error`, if the connection is gone already.
UniqueFd take_descriptor(asio::ip::tcp::socket& socket, std::error_code& error);

/// The endpoints that the place names; empty, with `error`, if it names none now. Asks the name
/// service, which has its own time limit, unless the address is numeric.
std::vector<asio::ip::tcp::endpoint> resolve(asio::io_context& io, const MeetingPlace& place,
                                             std::error_code& error);

}  // namespace deep_ep
