#pragma once
// Dispatch between CPU ranks: counts first, then every row once, to its final place.
//
// Stages   count, exchange, place, offer, send to other domains, move, forward, publish, acquire,
// finish Window   output blocks of the receiver, whose offsets it offers for this call alone Order
// a rank writes into a peer's window only after it saw the peer's Stage::kOffered (acquire), and
//          the peer reads its rows only after it saw the writer's Stage::kDone (acquire)
// Hybrid   a token goes once to each other domain, to the rank at the same place there, which
// forwards it
#include <memory>
#include <vector>

#include "backends/cpu/delivery.hpp"
#include "backends/cpu/ep_call.hpp"
#include "backends/ep_backend.hpp"
#include "base/event_state.hpp"

namespace deep_ep::cpu {

class Dispatch : public DispatchCall {
 public:
  /// Lends the outputs here if their shapes are known; throws kSystem if there is no room.
  Dispatch(const DispatchArgs& args, const DispatchPlan& plan, Arena& arena);

  /// Waits for what this rank needs first. If it throws, no other rank knows of the call yet.
  void prepare();

  /// The whole call, on the thread of its turn.
  void run(CallContext& context);

  /// Ends the call: the outputs become valid, or waiters get `error`.
  void finish(std::exception_ptr error);

  DispatchOutputs outputs() override;
  Event event() const override { return Event(done_); }

 private:
  void lend_outputs(Arena& arena, std::int64_t num_rows, std::int64_t num_recv_tokens);
  void tell_shapes();
  void place(CallContext& context, const CountMatrix& counts);
  void clear_padding() const;
  void offer(CallContext& context);
  void send_to_other_domains(CallContext& context) const;
  void place_landed(CallContext& context, const CountMatrix& counts, int node);
  TokenBatch own_tokens() const;
  TokenBatch landed_tokens(int node) const;

  DispatchArgs args_;
  const DispatchPlan plan_;
  std::shared_ptr<EPHandle> new_handle_;      // null when the call has a handle
  std::shared_ptr<EPRouting> new_routing_;    // likewise
  std::shared_ptr<const EPRouting> routing_;  // of this or of the handle's dispatch
  DispatchOutputs outputs_;
  std::vector<std::shared_ptr<void>> landings_;  // one a domain, for the rows from there
  bool are_shapes_known_ = false;
  std::shared_ptr<HostEventState> shapes_known_ = std::make_shared<HostEventState>();
  std::shared_ptr<HostEventState> done_ = std::make_shared<HostEventState>();
};

}  // namespace deep_ep::cpu
