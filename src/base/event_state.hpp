#pragma once
// The shared state behind Event: set once by the work, waited for by anybody.
#include <condition_variable>
#include <exception>
#include <mutex>

namespace deep_ep {

class EventState {
 public:
  virtual ~EventState() = default;
  virtual bool is_done() const = 0;
  virtual void wait() const = 0;
  virtual void wait_on(void* stream) const = 0;
};

/// The end of work of the host.
class HostEventState : public EventState {
 public:
  /// Ends the work; `error` is null on success. Called once.
  void set_done(std::exception_ptr error) {
    const std::scoped_lock lock(mutex_);
    error_ = std::move(error);
    is_done_ = true;
    done_.notify_all();
  }

  bool is_done() const override {
    const std::scoped_lock lock(mutex_);
    return is_done_;
  }

  void wait() const override {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return is_done_; });
    if (error_) std::rethrow_exception(error_);
  }

  void wait_on(void* /*stream*/) const override { wait(); }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable done_;
  bool is_done_ = false;
  std::exception_ptr error_;
};

}  // namespace deep_ep
