#pragma once
// The order in which the calls of one buffer run: first made, first run, one at a time.
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace deep_ep::cpu {

/// A queue with one thread, which starts with the first asynchronous call. Synchronous calls run on
/// the thread that makes them when their turn comes: no hand-over on the fast path.
class Stream {
 public:
  Stream() = default;
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  /// Queues `work`, which must not throw.
  void enqueue(std::function<void()> work);

  /// Runs `work` on this thread after all that was queued before; may throw what `work` throws.
  void run(const std::function<void()>& work);

 private:
  void serve();
  void finish_turn();

  std::mutex mutex_;
  std::condition_variable turn_;
  std::uint64_t next_ticket_ = 0, now_serving_ = 0;
  struct Item {
    std::uint64_t ticket;
    std::function<void()> work;
  };
  std::deque<Item> queue_;
  bool is_stopping_ = false;
  std::thread thread_;
};

}  // namespace deep_ep::cpu
