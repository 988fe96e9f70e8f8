#include "backends/cpu/workers.hpp"

#include <sched.h>

#include <algorithm>

#include "base/config.hpp"

namespace deep_ep::cpu {

Workers::~Workers() {
  {
    const std::scoped_lock lock(mutex_);
    is_stopping_ = true;
    wake_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
}

void Workers::parallel_for(std::int64_t count, std::int64_t grain,
                           const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (count <= 0) return;
  const std::int64_t num_pieces = (count + grain - 1) / grain;
  const int num_helpers = static_cast<int>(std::min<std::int64_t>(num_threads_, num_pieces)) - 1;
  const Job job = {count, grain, &body};
  next_.store(0, std::memory_order_relaxed);
  if (num_helpers <= 0) {
    work_on(job);
    return;
  }
  {
    const std::scoped_lock lock(mutex_);
    start_threads();
    job_ = job;
    num_wanted_ = num_busy_ = num_helpers;
    ++generation_;
    wake_.notify_all();
  }
  work_on(job);
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return num_busy_ == 0; });
}

void Workers::start_threads() {
  while (static_cast<int>(threads_.size()) < num_threads_ - 1) {
    const int thread_idx = static_cast<int>(threads_.size());
    threads_.emplace_back([this, thread_idx] { run(thread_idx); });
  }
}

void Workers::run(int thread_idx) {
  std::uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return is_stopping_ || generation_ != seen; });
    if (is_stopping_) return;
    seen = generation_;
    if (thread_idx >= num_wanted_) continue;
    const Job job = job_;
    lock.unlock();
    work_on(job);
    lock.lock();
    if (--num_busy_ == 0) idle_.notify_one();
  }
}

void Workers::work_on(const Job& job) {
  while (true) {
    const std::int64_t begin = next_.fetch_add(job.grain, std::memory_order_relaxed);
    if (begin >= job.count) return;
    (*job.body)(begin, std::min(begin + job.grain, job.count));
  }
}

int num_usable_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

int default_num_threads(int num_ranks_on_host) {
  const int configured = config::cpu_threads();
  return configured > 0 ? configured : std::max(1, num_usable_cores() / num_ranks_on_host);
}

}  // namespace deep_ep::cpu
