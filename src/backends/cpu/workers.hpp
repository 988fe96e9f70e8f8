#pragma once
// The threads among which a rank splits the rows of one call.
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace deep_ep::cpu {

/// A fixed team: the calling thread and `num_threads - 1` others, which start at the first use that
/// needs them and sleep in between.
class Workers {
 public:
  explicit Workers(int num_threads) : num_threads_(num_threads) {}
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  int num_threads() const noexcept { return num_threads_; }

  /// Calls `body(begin, end)` for pieces of [0, count) of at most `grain`, and returns when all are
  /// done. `body` must not throw. One caller at a time.
  void parallel_for(std::int64_t count, std::int64_t grain,
                    const std::function<void(std::int64_t, std::int64_t)>& body);

 private:
  struct Job {
    std::int64_t count, grain;
    const std::function<void(std::int64_t, std::int64_t)>* body;
  };
  void start_threads();
  void run(int thread_idx);
  void work_on(const Job& job);

  const int num_threads_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::uint64_t generation_ = 0;  // counts jobs
  int num_wanted_ = 0;            // helpers that take part in this job
  int num_busy_ = 0;              // helpers that have not finished it
  bool is_stopping_ = false;
  Job job_ = {};
  std::atomic<std::int64_t> next_ = 0;
};

/// Threads a rank should use: `EP_CPU_THREADS`, else its share of the cores this process may run
/// on.
int default_num_threads(int num_ranks_on_host);

/// Cores that this process may run on.
int num_usable_cores();

}  // namespace deep_ep::cpu
