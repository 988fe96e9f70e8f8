#pragma once
// Combine between CPU ranks: every rank reads its tokens' rows where the experts left them, and
// sums.
//
// Stages   stage (only rows outside the window), exchange, reduce for other domains, sum, publish,
// acquire Window   the experts' rows of each rank: a tensor that its buffer lent, or one copy of
// another tensor Order    a rank reads a peer's rows after it saw the peer's announcement of the
// call (acquire); the peer's
//          call ends after it saw Stage::kDone of all (acquire), so nobody reads rows that may
//          change
// Hybrid   the rank at the same place of each other domain sums the rows of that domain and sends
// the sum
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "backends/cpu/domain_rows.hpp"
#include "backends/cpu/ep_call.hpp"
#include "backends/cpu/rows.hpp"
#include "backends/ep_backend.hpp"
#include "base/event_state.hpp"

namespace deep_ep::cpu {

class Combine : public CombineCall {
 public:
  /// Lends the outputs; throws kSystem if there is no room.
  Combine(const CombineArgs& args, const CombinePlan& plan, bool allow_multiple_reduction,
          Arena& arena);

  /// Waits for what this rank needs first. If it throws, no other rank knows of the call yet.
  void prepare();

  /// The whole call but a deferred epilogue, on the thread of its turn.
  void run(CallContext& context);

  /// Ends the call: the outputs become valid, or waiters get `error`.
  void finish(std::exception_ptr error);

  CombineOutputs outputs(void* stream) override;
  Event event() const override { return Event(done_); }

 private:
  void stage_inputs(CallContext& context, CallHeader& header);
  void land_from_other_domains(CallContext& context);
  void reduce_for_other_domains(CallContext& context);
  void reduce_token(const CallContext& context, const ForwardedTokens& tokens, std::int64_t token,
                    std::int64_t target_offset, int peer, std::uint16_t* scratch) const;
  void sum(CallContext& context);
  void add_terms(std::int64_t token, std::uint16_t* scratch, Terms& terms) const;
  void add_bias(std::int64_t token, Terms& terms) const;
  void collect_weights(std::int64_t token) const;
  void keep_terms(std::int64_t token, const Terms& terms);
  void run_epilogue();

  std::int64_t landing_rows() const noexcept;
  std::int64_t landing_slot_bytes() const noexcept;
  const std::byte* landed(std::int64_t token, int node) const;

  CombineArgs args_;
  const CombinePlan plan_;
  const bool rounds_on_the_way_;  // sums of one rank, and of one domain, are rounded to BF16
  std::shared_ptr<const EPRouting> routing_;
  CombineOutputs outputs_;

  std::vector<std::shared_ptr<void>> staged_;  // copies of inputs outside the window
  std::optional<DomainRows> domain_rows_;      // inputs of all ranks of the domain
  std::vector<std::shared_ptr<void>>
      landings_;  // one a domain: what it sends for this rank's tokens

  bool keeps_terms_ = false;  // the epilogue adds the terms to a bias not known yet
  std::vector<std::vector<std::uint16_t>>
      terms_;  // then: the rows of each token, one after another
  std::once_flag epilogue_once_;
  std::shared_ptr<HostEventState> done_ = std::make_shared<HostEventState>();
};

}  // namespace deep_ep::cpu
