#include "transport/peer_link.hpp"

#include "os/process.hpp"
#include "os/socket.hpp"

namespace deep_ep {

PeerLink::PeerLink(UniqueFd descriptor, UniqueFd channel)
    : descriptor_(std::move(descriptor)), channel_(std::move(channel)) {
  const pid_t pid = peer_pid(channel_.get());
  if (pid > 0) process_ = open_pidfd(pid);
}

bool PeerLink::is_alive() const noexcept {
  if (is_same_process()) return true;
  return !has_hung_up(channel_.get()) && !(process_ && has_exited(process_));
}

}  // namespace deep_ep
