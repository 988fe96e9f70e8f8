#include "backends/cuda/ep_backend.hpp"

#include <algorithm>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "backends/agree.hpp"
#include "backends/cuda/ep_combine.hpp"
#include "backends/cuda/ep_dispatch.hpp"
#include "backends/cuda/graph_pool.hpp"
#include "backends/cuda/window.hpp"
#include "base/check.hpp"
#include "os/process.hpp"
#include "transport/agreement.hpp"
#include "transport/peer_exchange.hpp"

namespace deep_ep::cuda {

namespace {

// What ranks of one process show each other.
struct LocalRank {
  std::shared_ptr<Window> window;
  std::shared_ptr<const Device> device;
  std::mutex mutex;
  std::uint64_t num_calls = 0;
  CUstream stream = nullptr;  // of the last call
};

abi::Announcement refusal_of(const std::string& reason) {
  CallTerms terms;
  terms.operation = static_cast<std::int64_t>(Operation::kRefused);
  abi::Announcement announcement = announcement_of(terms, 0);
  announcement.refusal = abi::Refusal::kReason;
  reason.copy(announcement.reason, sizeof(announcement.reason) - 1);
  return announcement;
}

class CudaEPBackend : public EPBackend {
 public:
  CudaEPBackend(std::shared_ptr<Bootstrap> bootstrap, const EPBufferOptions& options)
      : physical_(agree_on_topology(*bootstrap)),
        logical_(deep_ep::logical_topology(physical_, options.allow_hybrid_mode)),
        options_(agree_on_options(*bootstrap, options, logical_)) {
    agree_on_success(*bootstrap, error_of([&] { open_device(); }));
    exchange_windows(*bootstrap);
    agree_on_success(*bootstrap, error_of([&] { share_table(); }));
    // The trial of every path between the ranks: stores and loads of all GPUs.
    agree_on_success(*bootstrap, error_of([&] { barrier(order_->own()).wait(); }));
  }

  ~CudaEPBackend() override {
    if (owner_.is_current()) destroy();
  }

  std::shared_ptr<DispatchCall> dispatch(const DispatchArgs& args,
                                         const DispatchPlan& plan) override {
    const bool waits = !plan.is_cached && plan.has_exact_counts;
    require(!waits || !capture_of(*context_.device, static_cast<CUstream>(args.stream)).is_active(),
            "a dispatch in a captured graph needs a handle, or do_cpu_sync=False: the host can't "
            "wait for counts there");
    return start("dispatch", args, [&](const CallContext& context, CUstream stream) {
      auto call = std::make_shared<Dispatch>(args, plan, context, *order_, stream,
                                             waits ? ++num_tickets_ : 0);
      if (waits && !args.is_async) call->outputs();
      if (waits && args.is_async) unfinished_ = [call] { call->outputs(); };
      return call;
    });
  }

  std::shared_ptr<CombineCall> combine(const CombineArgs& args, const CombinePlan& plan) override {
    return start("combine", args, [&](const CallContext& context, CUstream stream) {
      auto call = std::make_shared<Combine>(args, plan, options_.allow_multiple_reduction, context,
                                            *order_, stream);
      const auto caller = static_cast<CUstream>(args.stream);
      if (args.defer_epilogue) unfinished_ = [call, caller] { call->outputs(caller); };
      return call;
    });
  }

  Event barrier(void* stream) override {
    require_usable();
    CallTerms terms;
    terms.operation = static_cast<std::int64_t>(Operation::kBarrier);
    return Event(meet(announcement_of(terms, 0), static_cast<CUstream>(stream)));
  }

  void* comm_stream() override {
    require_usable();
    return order_->own();
  }

  int num_device_sms() const noexcept override { return context_.device->num_sms(); }

  void refuse(const char* operation, const std::string& reason) override {
    // The caller throws; what the peers make of it is not this rank's error.
    try {
      meet(refusal_of(reason), order_->own())->wait();
    } catch (const Error& error) {
      if (error.what() != reason) throw Error(error.code(), concat(operation, ": ", error.what()));
    }
  }

  Tensor empty(std::int64_t num_rows, std::int64_t num_columns, DType dtype,
               void* stream) override {
    require_usable();
    require(num_rows >= 0 && num_columns >= 0, "a shape must not be negative, got [", num_rows,
            ", ", num_columns, "]");
    const std::scoped_lock lock(mutex_);
    return lender_on(static_cast<CUstream>(stream))->lend_matrix(num_rows, num_columns, dtype);
  }

  void require_usable() override {
    require(owner_.is_current(),
            "the buffer belongs to the process that made it, not to a forked child");
    require(order_ != nullptr, "the buffer has been destroyed");
    context_.status->throw_if_broken();
  }

  void destroy() override {
    if (order_ == nullptr || !owner_.is_current()) return;
    const std::scoped_lock lock(mutex_);
    const CurrentContext current(*context_.device);
    // After the calls made so far, each of which ends in time.
    finish_last_call();
    order_->begin_last();
    const abi::MeetParams params = {.context = context_.abi, .announcement = {}, .leaves = 1};
    context_.kernels->launch(KernelId::kMeet, {.num_blocks = 1, .num_threads = 32}, order_->own(),
                             params);
    check(driver().cuStreamSynchronize(order_->own()), "cuStreamSynchronize");
    order_.reset();
  }

  const EPBufferOptions& options() const noexcept override { return options_; }
  const Topology& physical_topology() const noexcept override { return physical_; }
  const Topology& logical_topology() const noexcept override { return logical_; }

 private:
  void open_device() {
    auto device = std::make_shared<const Device>(options_.cuda_device);
    context_.device = device;
    const CurrentContext current(*device);
    context_.kernels = std::make_shared<Kernels>(device);
    context_.status = std::make_shared<Status>(device, logical_, wait_limit(options_));
    context_.abi.layout = abi::make_window_layout(logical_.num_ranks, kMaxExperts);
    own_window_ = Window::create(device, window_bytes());
    descriptor_ = own_window_->export_descriptor();
  }

  // Small buffers get more than they ask for: handles, padding and other outputs live there too.
  std::int64_t window_bytes() const {
    constexpr std::int64_t kLeastArenaBytes = std::int64_t{256} << 20;
    return context_.abi.layout.arena + std::max(options_.num_bytes, kLeastArenaBytes);
  }

  void exchange_windows(Bootstrap& bootstrap) {
    local_ = std::make_shared<LocalRank>();
    local_->window = own_window_;
    local_->device = context_.device;
    context_.links = std::make_shared<const std::vector<PeerLink>>(
        exchange_peers(bootstrap, descriptor_.get(), local_, wait_limit(options_)));
    descriptor_.reset();
    agree_on_success(
        bootstrap, error_of([&] {
          order_ = std::make_unique<StreamOrder>(context_.device, context_.status, context_.links);
          std::vector<std::shared_ptr<Window>> windows;
          int num_on_device = 0;
          for (int rank = 0; rank < logical_.num_ranks; ++rank) {
            const PeerLink& link = (*context_.links)[static_cast<std::size_t>(rank)];
            if (!link.is_same_process()) {
              windows.push_back(
                  Window::map(context_.device, link.descriptor().get(), window_bytes()));
              continue;
            }
            const auto local = std::static_pointer_cast<LocalRank>(link.object());
            const bool is_own_device = local->device->ordinal() == context_.device->ordinal();
            if (is_own_device) ++num_on_device;
            if (local != local_) neighbors_.push_back(local);
            if (!is_own_device) local->window->allow(*context_.device);
            windows.push_back(local->window);
          }
          context_.windows = std::make_shared<const decltype(windows)>(std::move(windows));
          context_.max_blocks = std::max(1, context_.device->num_sms() / num_on_device);
        }));
  }

  // The addresses of all windows, in device memory, and what else is the same in every call.
  void share_table() {
    const CurrentContext current(*context_.device);
    context_.arena = std::make_shared<Arena>(ArenaMemory{.base = own_window_->base(),
                                                         .begin = context_.abi.layout.arena,
                                                         .end = own_window_->num_bytes(),
                                                         .block_bytes = 512,
                                                         .cuda_device = options_.cuda_device,
                                                         .owner = own_window_,
                                                         .release = {}});
    context_.lender = context_.arena;
    context_.table = context_.arena->lend_vector(logical_.num_ranks, DType::kInt64);
    std::vector<std::uint64_t> addresses;
    for (const auto& window : *context_.windows) {
      addresses.push_back(reinterpret_cast<std::uint64_t>(window->base()));
    }
    check(driver().cuMemcpyHtoD(reinterpret_cast<CUdeviceptr>(context_.table.view.data),
                                addresses.data(), addresses.size() * sizeof(addresses[0])),
          "cuMemcpyHtoD");
    context_.abi.window = reinterpret_cast<std::uint8_t*>(own_window_->base());
    context_.abi.windows = context_.table.as<std::uint8_t*>();
    context_.abi.rank_idx = logical_.rank_idx;
    context_.abi.num_ranks = logical_.num_ranks;
    context_.status->describe(context_.abi);
  }

  // A call whose second half waits for the number of received rows, or for its epilogue, comes to
  // its end before the next one begins: all ranks make the same calls in the same order.
  void finish_last_call() {
    if (!unfinished_) return;
    const auto finish = std::exchange(unfinished_, nullptr);
    try {
      finish();
    } catch (const Error&) {
      // Who asks that call for its outputs gets the error again, or the buffer is broken.
    }
  }

  // Ranks of one process wait for each other on the GPU, so no two of them may share a stream. The
  // later one of such a call finds out.
  void require_own_stream(const char* operation, CUstream stream) {
    const std::uint64_t call = ++num_calls_;
    {
      const std::scoped_lock lock(local_->mutex);
      local_->num_calls = call;
      local_->stream = stream;
    }
    for (const auto& neighbor : neighbors_) {
      const std::scoped_lock lock(neighbor->mutex);
      if (neighbor->num_calls != call || neighbor->stream != stream) continue;
      if (neighbor->device->ordinal() != context_.device->ordinal()) continue;
      const std::string reason =
          concat(operation,
                 ": ranks that share a GPU and a process need a stream each, but two of them "
                 "made the call on the same one");
      post_meeting(refusal_of(reason), order_->begin(order_->own(), false));
      throw Error(ErrorCode::kInvalidArgument, reason);
    }
  }

  // Makes a call. What keeps it from being made, the peers hear.
  template <typename Args, typename Make>
  auto start(const char* operation, const Args& args, const Make& make)
      -> decltype(make(std::declval<const CallContext&>(), CUstream{})) {
    const std::scoped_lock lock(mutex_);
    const CurrentContext current(*context_.device);
    finish_last_call();
    require_own_stream(operation,
                       args.is_async ? order_->own() : static_cast<CUstream>(args.stream));
    CallContext context = context_;
    context.lender = lender_on(static_cast<CUstream>(args.stream));
    const CUstream stream = order_->begin(static_cast<CUstream>(args.stream), args.is_async);
    args.previous_event.wait_on(stream);
    const std::uint64_t num_launches = context_.kernels->num_launches();
    try {
      return make(context, stream);
    } catch (const Error& error) {
      if (context_.kernels->num_launches() != num_launches) throw;
      post_meeting(refusal_of(concat(operation, ": ", error.what())), stream);
      throw;
    }
  }

  // Who lends for work on a stream. A graph that is being captured keeps its memory, and all else
  // that kernels touch.
  std::shared_ptr<Lender> lender_on(CUstream stream) {
    const Capture capture = capture_of(*context_.device, stream);
    if (!capture.is_active()) return context_.arena;
    drop_what_graphs_kept();
    auto pool = graph_pool_.lock();
    if (pool == nullptr) {
      pool = std::make_shared<GraphPool>(context_.arena);
      graph_pool_ = pool;
    }
    if (capture.id != last_capture_id_) {
      keep_with_graph(capture.graph,
                      std::make_shared<std::pair<CallContext, decltype(pool)>>(context_, pool));
      last_capture_id_ = capture.id;
    }
    return pool;
  }

  std::shared_ptr<CallEvent> meet(const abi::Announcement& announcement, CUstream caller) {
    const std::scoped_lock lock(mutex_);
    const CurrentContext current(*context_.device);
    finish_last_call();
    require_own_stream("barrier", caller);
    return post_meeting(announcement, order_->begin(caller, false));
  }

  std::shared_ptr<CallEvent> post_meeting(const abi::Announcement& announcement, CUstream stream) {
    const abi::MeetParams params = {
        .context = context_.abi, .announcement = announcement, .leaves = 0};
    context_.kernels->launch(KernelId::kMeet, {.num_blocks = 1, .num_threads = 256}, stream,
                             params);
    return order_->end(stream);
  }

  const OwnerProcess owner_;
  const Topology physical_, logical_;
  const EPBufferOptions options_;
  CallContext context_;
  std::shared_ptr<Window> own_window_;
  std::shared_ptr<LocalRank> local_;
  std::vector<std::shared_ptr<LocalRank>> neighbors_;  // other ranks of this process
  std::uint64_t num_calls_ = 0;
  UniqueFd descriptor_;
  std::weak_ptr<GraphPool> graph_pool_;
  std::uint64_t last_capture_id_ = 0;
  std::mutex mutex_;
  std::uint64_t num_tickets_ = 0;
  std::function<void()> unfinished_;
  std::unique_ptr<StreamOrder> order_;  // null: destroyed
};

}  // namespace

std::unique_ptr<EPBackend> make_ep_backend(std::shared_ptr<Bootstrap> bootstrap,
                                           const EPBufferOptions& options) {
  require(bootstrap != nullptr, "a bootstrap must be given");
  return std::make_unique<CudaEPBackend>(std::move(bootstrap), options);
}

}  // namespace deep_ep::cuda
