#include "backends/cpu/stream.hpp"

#include <utility>

namespace deep_ep::cpu {

Stream::~Stream() {
  {
    const std::scoped_lock lock(mutex_);
    is_stopping_ = true;
    turn_.notify_all();
  }
  if (thread_.joinable()) thread_.join();  // after what is queued: each work has its own limit
}

void Stream::enqueue(std::function<void()> work) {
  const std::scoped_lock lock(mutex_);
  if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
  queue_.push_back({next_ticket_++, std::move(work)});
  turn_.notify_all();
}

void Stream::run(const std::function<void()>& work) {
  {
    std::unique_lock lock(mutex_);
    const std::uint64_t ticket = next_ticket_++;
    turn_.wait(lock, [&] { return now_serving_ == ticket; });
  }
  struct Turn {
    Stream* stream;
    ~Turn() { stream->finish_turn(); }
  } const turn{this};
  work();
}

void Stream::finish_turn() {
  const std::scoped_lock lock(mutex_);
  ++now_serving_;
  turn_.notify_all();
}

void Stream::serve() {
  while (true) {
    Item item;
    {
      std::unique_lock lock(mutex_);
      turn_.wait(lock, [this] {
        return queue_.empty() ? is_stopping_ : queue_.front().ticket == now_serving_;
      });
      if (queue_.empty()) return;
      item = std::move(queue_.front());
      queue_.pop_front();
    }
    item.work();
    item.work = nullptr;  // what it kept alive goes before the next turn
    finish_turn();
  }
}

}  // namespace deep_ep::cpu
