#include "transport/tcp_endpoint.hpp"

#include <fcntl.h>

#include <cerrno>

#include "base/check.hpp"
#include "os/system_error.hpp"

namespace deep_ep {

using asio::ip::tcp;

std::string place_text(const MeetingPlace& place) {
  const bool is_bare_ipv6 =
      place.address.find(':') != std::string::npos && place.address.front() != '[';
  return is_bare_ipv6 ? concat("[", place.address, "]:", place.port)
                      : concat(place.address, ":", place.port);
}

std::string endpoint_text(const tcp::endpoint& endpoint) {
  return place_text({.address = endpoint.address().to_string(), .port = endpoint.port()});
}

std::string network_error_text(const std::error_code& error) {
  if (error.category() == asio::error::get_system_category()) return errno_text(error.value());
  return concat(error.message(), " (", error.value(), ")");
}

UniqueFd take_descriptor(tcp::socket& socket, std::error_code& error) {
  socket.set_option(tcp::no_delay(true), error);
  if (error) return {};
  UniqueFd descriptor(socket.release(error));
  if (!error && ::fcntl(descriptor.get(), F_SETFD, FD_CLOEXEC) != 0) {
    throw_system_error(errno, "fcntl FD_CLOEXEC on socket ", descriptor.get());
  }
  return descriptor;
}

std::vector<tcp::endpoint> resolve(asio::io_context& io, const MeetingPlace& place,
                                   std::error_code& error) {
  std::string address = place.address;
  if (address.size() > 2 && address.front() == '[' && address.back() == ']') {
    address = address.substr(1, address.size() - 2);
  }
  tcp::resolver resolver(io);
  const auto results =
      resolver.resolve(address, concat(place.port), tcp::resolver::numeric_service, error);
  std::vector<tcp::endpoint> endpoints;
  for (const auto& result : results) endpoints.push_back(result.endpoint());
  return endpoints;
}

}  // namespace deep_ep
