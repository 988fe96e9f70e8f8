#include "backends/cpu/ep_backend.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <iostream>
#include <mutex>
#include <optional>
#include <utility>

#include "backends/agree.hpp"
#include "backends/cpu/ep_combine.hpp"
#include "backends/cpu/ep_dispatch.hpp"
#include "backends/cpu/stream.hpp"
#include "base/check.hpp"
#include "base/config.hpp"

namespace deep_ep::cpu {

namespace {

// Address space beyond num_bytes, for outputs that live longer than the next call: as much as the
// machine has memory, so that memory ends before it does. Untouched pages cost nothing.
std::int64_t overflow_bytes(int num_ranks) {
  const std::int64_t memory = std::int64_t{::sysconf(_SC_PHYS_PAGES)} * ::sysconf(_SC_PAGESIZE);
  constexpr std::int64_t kMostOfAllRanks = std::int64_t{16} << 40;
  return align_up(std::min(memory, kMostOfAllRanks / num_ranks), kAllocationAlignment);
}

// A call that only brings the ranks together.
class Barrier {
 public:
  void prepare() const {}
  void run(CallContext& context) const {
    CallHeader header;
    header.terms.operation = static_cast<std::int64_t>(Operation::kBarrier);
    exchange(context.ranks, context.network, context.id, header, {}, nullptr);
    context.ranks.post_stage(context.id, Stage::kDone);
  }
  void finish(std::exception_ptr error) { done_->set_done(std::move(error)); }
  Event event() const { return Event(done_); }

 private:
  std::shared_ptr<HostEventState> done_ = std::make_shared<HostEventState>();
};

// A call that this rank cannot make, so that none makes it.
class Refusal {
 public:
  explicit Refusal(const std::string& reason) {
    header_.terms.operation = static_cast<std::int64_t>(Operation::kRefused);
    const std::size_t length = std::min(reason.size(), header_.reason.size() - 1);
    std::copy_n(reason.begin(), length, header_.reason.begin());
  }
  void prepare() const {}
  void run(CallContext& context) const {
    context.ranks.allow_abandoning(
        true);  // the caller has its error already: do not keep it from leaving
    exchange(context.ranks, context.network, context.id, header_, {}, nullptr);
  }
  void finish(const std::exception_ptr&) {}

 private:
  CallHeader header_;
};

class CpuEPBackend : public EPBackend {
 public:
  CpuEPBackend(std::shared_ptr<Bootstrap> bootstrap, const EPBufferOptions& options)
      : physical_(agree_on_topology(*bootstrap)),
        logical_(deep_ep::logical_topology(physical_, options.allow_hybrid_mode)),
        options_(agree_on_options(*bootstrap, options, logical_)),
        arena_begin_(WindowLayout(logical_).arena) {
    const std::int64_t window_bytes =
        arena_begin_ + options_.num_bytes + overflow_bytes(logical_.num_ranks);
    ranks_ = std::make_unique<Ranks>(*bootstrap, logical_, window_bytes, wait_limit(options_));
    network_ = std::make_unique<LoopbackNetwork>(*ranks_);
    arena_ = make_arena(ranks_->own(), arena_begin_, window_bytes, options_.num_bytes);
    workers_ = std::make_unique<Workers>(default_num_threads(ranks_->num_ranks_on_host()));
    stream_ = std::make_unique<Stream>();
    if (config::buffer_debug() > 0) {
      std::cerr << concat("deep_ep: rank ", logical_.rank_idx, "/", logical_.num_ranks,
                          ": domains of ", logical_.num_scaleup_ranks, ", num_bytes ",
                          options_.num_bytes, ", threads ", workers_->num_threads(), "\n");
    }
  }

  ~CpuEPBackend() override {
    if (owner_.is_current()) {
      destroy();
      return;
    }
    // A forked child has none of the threads, and the peers are its parent's.
    static_cast<void>(stream_.release());
    static_cast<void>(workers_.release());
  }

  std::shared_ptr<DispatchCall> dispatch(const DispatchArgs& args,
                                         const DispatchPlan& plan) override {
    return start("dispatch", args.is_async,
                 [&] { return std::make_shared<Dispatch>(args, plan, *arena_); });
  }

  std::shared_ptr<CombineCall> combine(const CombineArgs& args, const CombinePlan& plan) override {
    return start("combine", args.is_async, [&] {
      return std::make_shared<Combine>(args, plan, options_.allow_multiple_reduction, *arena_);
    });
  }

  Event barrier(void* /*stream*/) override {
    require_usable();
    start("barrier", false, [] { return std::make_shared<Barrier>(); });
    return Event();
  }

  void* comm_stream() override { return nullptr; }
  int num_device_sms() const noexcept override { return 0; }

  void refuse(const char* operation, const std::string& reason) override {
    enqueue(operation, std::make_shared<Refusal>(reason));
  }

  Tensor empty(std::int64_t num_rows, std::int64_t num_columns, DType dtype,
               void* /*stream*/) override {
    require_usable();
    require(num_rows >= 0 && num_columns >= 0, "a shape must not be negative, got [", num_rows,
            ", ", num_columns, "]");
    return arena_->lend_matrix(num_rows, num_columns, dtype);
  }

  void require_usable() override {
    require(owner_.is_current(),
            "the buffer belongs to the process that made it, not to a forked child");
    require(stream_ != nullptr, "the buffer has been destroyed");
    const std::scoped_lock lock(mutex_);
    if (first_error_) std::rethrow_exception(first_error_);
  }

  void destroy() override {
    if (stream_ == nullptr || !owner_.is_current()) return;
    ranks_->abandon_waits();
    stream_.reset();  // ends the calls made so far
    ranks_->leave(ErrorCode::kPeer, concat("it destroyed its buffer after call ", num_calls_));
    network_.reset();
    ranks_.reset();
    workers_.reset();
  }

  const EPBufferOptions& options() const noexcept override { return options_; }
  const Topology& physical_topology() const noexcept override { return physical_; }
  const Topology& logical_topology() const noexcept override { return logical_; }

 private:
  // Makes a call, on this thread or on the stream's. What keeps it from being made, the peers hear.
  template <typename Make>
  auto start(const char* operation, bool is_async, const Make& make) -> decltype(make()) {
    decltype(make()) call;
    try {
      call = make();
    } catch (const std::exception& error) {
      refuse(operation, error.what());
      throw;
    }
    if (is_async) {
      enqueue(operation, call);
    } else {
      stream_->run([&] { take_turn(operation, *call); });
      call->event().wait();
    }
    return call;
  }

  template <typename Call>
  void enqueue(const char* operation, std::shared_ptr<Call> call) {
    stream_->enqueue([this, operation, call = std::move(call)] { take_turn(operation, *call); });
  }

  template <typename Call>
  void take_turn(const char* operation, Call& call) {
    std::exception_ptr error = first_error();
    if (!error) {
      try {
        CallContext context = {*ranks_, *network_, *arena_, *workers_, {++num_calls_, operation}};
        prepare_or_refuse(context, call);
        call.run(context);
      } catch (const CallRefused&) {
        error = std::current_exception();
      } catch (const Error& failure) {
        error = std::current_exception();
        fail(failure);
      } catch (const std::exception& failure) {
        error = std::make_exception_ptr(Error(ErrorCode::kInternal, failure.what()));
        fail(Error(ErrorCode::kInternal, failure.what()));
      }
      ranks_->allow_abandoning(false);
    }
    call.finish(std::move(error));
  }

  // A call that this rank can't begin, it still takes part in: to say so.
  template <typename Call>
  static void prepare_or_refuse(CallContext& context, Call& call) {
    try {
      call.prepare();
    } catch (const Error& error) {
      try {
        Refusal(error.what()).run(context);
      } catch (const CallRefused&) {  // what it asked for
      }
      throw CallRefused(error.code(), error.what());
    }
  }

  std::exception_ptr first_error() {
    const std::scoped_lock lock(mutex_);
    return first_error_;
  }

  // Ends the use of the buffer: rows may be half-way, so nobody may rely on the windows any more.
  void fail(const Error& error) {
    ranks_->leave(error.code(), error.what());
    const std::scoped_lock lock(mutex_);
    first_error_ = std::make_exception_ptr(error);
  }

  const OwnerProcess owner_;
  const Topology physical_, logical_;
  const EPBufferOptions options_;
  const std::int64_t arena_begin_;
  std::unique_ptr<Ranks> ranks_;
  std::unique_ptr<Network> network_;
  std::shared_ptr<Arena> arena_;
  std::unique_ptr<Workers> workers_;
  std::uint64_t num_calls_ = 0;  // of the stream's turn
  std::mutex mutex_;
  std::exception_ptr first_error_;
  std::unique_ptr<Stream> stream_;  // last: its thread uses the others
};

}  // namespace

std::unique_ptr<EPBackend> make_ep_backend(std::shared_ptr<Bootstrap> bootstrap,
                                           const EPBufferOptions& options) {
  require(bootstrap != nullptr, "a bootstrap must be given");
  return std::make_unique<CpuEPBackend>(std::move(bootstrap), options);
}

}  // namespace deep_ep::cpu
