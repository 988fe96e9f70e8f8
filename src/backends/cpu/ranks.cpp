#include "backends/cpu/ranks.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <thread>

#include "backends/cpu/workers.hpp"
#include "base/check.hpp"
#include "base/config.hpp"

namespace deep_ep::cpu {

namespace {

// What a phase says about a rank that is awaited in call `call`.
std::string progress_text(std::uint64_t phase, std::uint64_t call) {
  const std::uint64_t at_call = phase / kStagesPerCall;
  if (at_call < call) {
    return at_call == 0 ? "did not arrive (it made no call yet)"
                        : concat("did not arrive (it is in or after call ", at_call, ")");
  }
  switch (static_cast<Stage>(phase % kStagesPerCall)) {
    case Stage::kAnnounced:
      return "arrived, but got no further than announcing the call";
    case Stage::kRelayed:
      return "arrived, but got no further than relaying messages";
    case Stage::kOffered:
      return "arrived and offered memory, but did not finish moving rows";
    case Stage::kDone:
      return "is done with it";
  }
  return "is in an unknown stage";
}

}  // namespace

Ranks::Ranks(Bootstrap& bootstrap, const Topology& logical, std::int64_t num_window_bytes,
             std::chrono::nanoseconds timeout)
    : topology_(logical),
      timeout_(timeout),
      max_delay_us_(config::test_delay_us()),
      random_(static_cast<std::uint32_t>(logical.rank_idx + 1)) {
  const WindowLayout layout(logical);
  const std::shared_ptr<Window> own = Window::create(layout, num_window_bytes);
  links_ = exchange_peers(bootstrap, own->fd(), own, timeout);
  policy_ = wait_policy_for(num_ranks_on_host(), num_usable_cores());
  for (int rank = 0; rank < logical.num_ranks; ++rank) {
    const PeerLink& link = links_[static_cast<std::size_t>(rank)];
    if (rank == logical.rank_idx) {
      windows_.push_back(own);
    } else if (link.is_same_process()) {
      windows_.push_back(std::static_pointer_cast<Window>(link.object()));
    } else {
      windows_.push_back(Window::map(layout, link.descriptor().get(), num_window_bytes));
    }
  }
}

void Ranks::post_stage(const CallId& call, Stage stage) {
  delay_on_purpose();
  post(own()->control().phase, phase_value(call.number, stage));
}

void Ranks::wait_for_stage(const CallId& call, Stage stage) {
  std::vector<Awaited> awaited;
  for (int rank = first_of_domain(); rank < last_of_domain(); ++rank) {
    if (rank != topology_.rank_idx) awaited.push_back({rank, &window(rank).control().phase});
  }
  wait_for(call, awaited, phase_value(call.number, stage));
}

void Ranks::wait_for_network(const CallId& call, NetworkSignal signal) {
  std::vector<Awaited> awaited;
  for (int node = 0; node < topology_.num_scaleout_ranks; ++node) {
    if (node == topology_.scaleout_rank_idx()) continue;
    awaited.push_back({topology_.rank_at(node, topology_.scaleup_rank_idx()),
                       &own()->inbox(node).signals[static_cast<std::size_t>(signal)]});
  }
  wait_for(call, awaited, call.number);
}

void Ranks::wait_for(const CallId& call, const std::vector<Awaited>& awaited,
                     std::uint64_t target) {
  delay_on_purpose();
  const auto deadline = Clock::now() + timeout_;
  std::exception_ptr gone;
  const auto should_stop = [&] {
    try {
      throw_if_gone(call, awaited, target);
    } catch (const Error&) {
      gone = std::current_exception();
    }
    return gone != nullptr;
  };
  for (const Awaited& word : awaited) {
    if (wait_at_least(*word.signal, target, policy_, deadline, should_stop)) continue;
    if (gone) std::rethrow_exception(gone);
    throw_timeout(call, awaited, target);
  }
}

void Ranks::throw_if_gone(const CallId& call, const std::vector<Awaited>& awaited,
                          std::uint64_t target) const {
  if (may_abandon_ && is_abandoned_.load()) {
    throw Error(ErrorCode::kPeer, prefix(call) + "given up: the buffer is being destroyed");
  }
  std::string dead;
  for (const Awaited& word : awaited) {
    Control& control = window(word.rank_idx).control();
    const bool is_dead = !links_[static_cast<std::size_t>(word.rank_idx)].is_alive();
    const bool has_left = std::atomic_ref(control.is_gone).load(std::memory_order_acquire) != 0;
    if (peek(*word.signal) >= target) continue;  // what it did before it went still counts
    if (has_left) {
      control.farewell.back() = '\0';
      throw Error(static_cast<ErrorCode>(control.farewell_code),
                  concat(prefix(call), "rank ", word.rank_idx, " left: ", control.farewell.data()));
    }
    if (is_dead) dead += concat(dead.empty() ? "" : ", ", word.rank_idx);
  }
  if (!dead.empty()) {
    throw Error(ErrorCode::kPeer,
                concat(prefix(call), "rank ", dead, " is gone: its process has ended"));
  }
}

void Ranks::throw_timeout(const CallId& call, const std::vector<Awaited>& awaited,
                          std::uint64_t target) const {
  std::string ranks, details;
  for (const Awaited& word : awaited) {
    const std::uint64_t seen = peek(*word.signal);
    if (seen >= target) continue;
    const bool is_phase = word.signal == &window(word.rank_idx).control().phase;
    ranks += concat(ranks.empty() ? "" : ", ", word.rank_idx);
    details += concat("; rank ", word.rank_idx, " ",
                      is_phase ? progress_text(seen, call.number)
                               : concat("sent nothing over the network since call ", seen));
  }
  const double seconds = std::chrono::duration<double>(timeout_).count();
  throw Error(ErrorCode::kTimeout,
              concat(prefix(call), "waited ", seconds, " s for rank ", ranks, details));
}

std::string Ranks::prefix(const CallId& call) const {
  return concat("rank ", topology_.rank_idx, "/", topology_.num_ranks, ": ", call.operation,
                " (call ", call.number, "): ");
}

void Ranks::leave(ErrorCode code, const std::string& farewell) noexcept {
  Control& control = own()->control();
  if (control.is_gone != 0) return;
  const std::size_t length = std::min(farewell.size(), control.farewell.size() - 1);
  std::memcpy(control.farewell.data(), farewell.data(), length);
  control.farewell[length] = '\0';
  control.farewell_code = static_cast<std::uint32_t>(code);
  std::atomic_ref(control.is_gone).store(1, std::memory_order_release);
}

void Ranks::delay_on_purpose() {
  if (max_delay_us_ == 0) return;
  std::this_thread::sleep_for(
      std::chrono::microseconds(static_cast<std::int64_t>(random_()) % (max_delay_us_ + 1)));
}

}  // namespace deep_ep::cpu
