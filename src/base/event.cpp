#include "deep_ep/event.hpp"

#include "base/event_state.hpp"

namespace deep_ep {

bool Event::is_done() const noexcept { return state_ == nullptr || state_->is_done(); }

void Event::wait() const {
  if (state_ != nullptr) state_->wait();
}

}  // namespace deep_ep
