#include "deep_ep/event.hpp"

#include "base/event_state.hpp"

namespace deep_ep {

bool Event::is_done() const noexcept { return state_ == nullptr || state_->is_done(); }

void Event::wait() const {
  if (state_ != nullptr) state_->wait();
}

void Event::wait_on(void* stream) const {
  if (state_ != nullptr) state_->wait_on(stream);
}

}  // namespace deep_ep
