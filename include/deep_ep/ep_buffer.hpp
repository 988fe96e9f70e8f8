#pragma once
// EPBuffer: sends tokens to the ranks of their experts (dispatch) and sums what comes back
// (combine).
//
// Letters: R ranks, E experts, L = E / R experts of a rank, T tokens of this rank, M the most
// tokens of any rank, H hidden, K top-k, P scale packs a token, A expert alignment, N tokens
// received by this rank. Expert e lives on rank e / L. Token i of rank s has the global id s * M +
// i.
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/event.hpp"
#include "deep_ep/tensor.hpp"
#include "deep_ep/topology.hpp"

namespace deep_ep {

/// Settings of an EPBuffer. All but the time limit must be equal on all ranks; creation checks it.
struct EPBufferOptions {
  /// Bytes of the exchange area, a positive multiple of 2 MiB; 0: sized from the three fields
  /// below.
  std::int64_t num_bytes = 0;
  int num_max_tokens_per_rank = 0;  ///< M of calls that name none, and for sizing
  int hidden = 0;                   ///< for sizing
  int num_topk = 0;                 ///< for sizing; 0: 32
  bool use_fp8_dispatch = false;    ///< for sizing
  bool allow_hybrid_mode = true;    ///< route in two levels when there are several scale-up domains
  /// True: rows of one token may be summed and rounded to BF16 per rank (and domain) on their way.
  bool allow_multiple_reduction = true;
  /// The GPU of this rank, or kHostMemory: tensors lie there, and so does the exchange area.
  int cuda_device = kHostMemory;
  /// Limit of every wait for another rank, in seconds; `EP_TIMEOUT_SECS` overrides it.
  double timeout_secs = 300;
};

/// Bytes of a buffer that serves a shape, by use; see EPBuffer::size_hint.
struct BufferSizeHint {
  std::int64_t lent_bytes = 0;     ///< one worst-case dispatch output and one combine output
  std::int64_t staging_bytes = 0;  ///< expert outputs outside the window, and rows between domains
  std::int64_t num_bytes = 0;      ///< both, rounded up to 2 MiB
};

class EPHandle;

/// Arguments of EPBuffer::dispatch. Tensors are borrowed until the event is done; `keep_alive` may
/// own them.
struct DispatchArgs {
  TensorView x;     ///< `[T, H]` bfloat16 or float8_e4m3, contiguous
  TensorView x_sf;  ///< FP8 scales `[T, P]`, float32 or int32 (four UE8M0), any strides; opaque
  TensorView
      topk_idx;  ///< `[T, K]` int64 or int32, contiguous; negative: no expert. Not with `handle`
  TensorView topk_weights;  ///< `[T, K]` float32, contiguous; optional
  /// `[L]` int32, optional: grows by the tokens each local expert receives. Not with `handle`
  TensorView cumulative_local_expert_recv_stats;
  int num_experts = 0;              ///< E, a multiple of R; 0: the handle's
  int num_max_tokens_per_rank = 0;  ///< M, equal on all ranks; 0: the handle's, else the buffer's
  int expert_alignment = 0;         ///< A; 0: the handle's, else 1
  int num_sms = 0;  ///< kept in the handle; 0: estimated. CPU ranks have threads instead
  std::shared_ptr<const EPHandle> handle;  ///< repeat this routing with another x
  bool do_cpu_sync = true;       ///< exact shapes; false: worst-case shapes, known at once
  bool do_expand = false;        ///< one row a (token, local expert), grouped by expert
  bool do_zero_padding = false;  ///< expanded only: zero the rows that alignment adds
  bool use_tma_aligned_col_major_sf =
      false;               ///< received scales column-major, columns of align(n, 4)
  bool is_async = false;   ///< return before the exchange is over
  Event previous_event;    ///< start after this
  void* stream = nullptr;  ///< CUDA ranks: the caller's `CUstream`, in whose order the call runs
  std::shared_ptr<void> keep_alive;  ///< released when the event is done
};

/// What dispatch received; `n` rows: N, the expanded rows, or their worst case without CPU sync.
struct DispatchOutputs {
  Tensor recv_x;         ///< `[n, H]`, dtype of x
  Tensor recv_x_sf;      ///< `[n, P]`, dtype of x_sf, or not given
  Tensor recv_topk_idx;  ///< compact: `[n, K]`, dtype of topk_idx, local expert or -1. Expanded:
                         ///< not given
  Tensor recv_topk_weights;  ///< compact `[n, K]`, expanded `[n]` float32, or not given
  std::shared_ptr<const EPHandle> handle;
};

/// Arguments of EPBuffer::combine. Tensors are borrowed until the event is done; `keep_alive` may
/// own them.
struct CombineArgs {
  TensorView x;  ///< `[n, H]` bfloat16, contiguous: one row a received row. Read in place if lent
                 ///< by this buffer
  std::shared_ptr<const EPHandle> handle;
  TensorView topk_weights;  ///< compact `[n, K]`, expanded `[n]` float32, contiguous; optional
  std::array<TensorView, 2> bias;  ///< `[T, H]` bfloat16, contiguous; optional
  int num_sms = 0;                 ///< 0: the handle's. CPU ranks have threads instead
  bool is_async = false;           ///< return before the exchange is over
  bool defer_epilogue = false;  ///< read the bias and write the sums in PendingCombine::outputs()
  Event previous_event;         ///< start after this
  void* stream = nullptr;       ///< CUDA ranks: the caller's `CUstream`
  std::shared_ptr<void> keep_alive;  ///< released when the event is done, or with the epilogue
};

/// What combine brings back to the tokens' owner.
struct CombineOutputs {
  Tensor combined_x;             ///< `[T, H]` bfloat16
  Tensor combined_topk_weights;  ///< `[T, K]` float32, 0 for lanes without expert; or not given
};

/// The routing of one dispatch: what combine and cached dispatches need. Immutable, shared,
/// thread-safe; tensors of an asynchronous dispatch are valid once its event is done.
class EPHandle {
 public:
  int num_experts = 0, num_topk = 0, expert_alignment = 1, num_max_tokens_per_rank = 0, num_sms = 0;
  bool do_expand = false;
  bool has_exact_counts = true;          ///< dispatched with CPU sync
  DType idx_dtype = DType::kInt64;       ///< of topk_idx
  Topology topology;                     ///< logical, of the buffer that dispatched
  std::int64_t num_tokens = 0;           ///< T
  std::int64_t num_recv_tokens = 0;      ///< N, or R * M without CPU sync
  std::int64_t num_expanded_tokens = 0;  ///< sum of aligned expert counts, or its worst case
  std::vector<std::int64_t>
      num_recv_tokens_per_expert_list;  ///< aligned, `[L]`; empty without CPU sync
  /// `[U]` int32: inclusive prefix sum of received tokens by source scale-up index; the last is N.
  /// With several scale-up domains rows are ordered by source rank, so only the last entry bounds
  /// rows.
  Tensor psum_num_recv_tokens_per_scaleup_rank;
  /// `[L]` int32. Compact: inclusive prefix sum of aligned counts. Expanded: end of each expert's
  /// rows.
  Tensor psum_num_recv_tokens_per_expert;
  Tensor num_unaligned_recv_tokens_per_expert;  ///< `[L]` int32
  /// `[N or R * M, K + 2]` int32: global token id; source rank * K + highest lane on this rank; the
  /// row of each lane in an expanded output (compact: unspecified), -1 for lanes on other ranks.
  Tensor recv_src_metadata;
  /// `[T, K]` int32: the row of each lane in the output of its expert's rank, -1 without expert.
  Tensor dst_rows;

  std::shared_ptr<const void> routing;  ///< of the backend
};

class DispatchCall;  // src/backends/ep_backend.hpp
class CombineCall;

/// A dispatch under way.
class PendingDispatch {
 public:
  explicit PendingDispatch(std::shared_ptr<DispatchCall> call) : call_(std::move(call)) {}
  /// The outputs, once their shapes are known; their contents are valid when `event()` is done.
  /// Throws the Error that the call ended with before that.
  DispatchOutputs outputs() const;
  Event event() const;

 private:
  std::shared_ptr<DispatchCall> call_;
};

/// A combine under way.
class PendingCombine {
 public:
  explicit PendingCombine(std::shared_ptr<CombineCall> call) : call_(std::move(call)) {}
  /// The outputs; their contents are valid when `event()` is done. With a deferred epilogue: waits
  /// for the event, runs the epilogue on this thread (once) and returns valid contents; CUDA ranks
  /// put it after what `stream` (a `CUstream`) holds, and contents are valid at the new `event()`.
  CombineOutputs outputs(void* stream = nullptr) const;
  Event event() const;

 private:
  std::shared_ptr<CombineCall> call_;
};

class EPBackend;  // src/backends/ep_backend.hpp

/// Dispatch and combine over the ranks of one group. Calls are collective: all ranks make the same
/// calls in the same order, with any number of tokens each. One thread at a time may be in a call;
/// calls run in the order in which they were made, whether asynchronous or not.
///
/// A call with bad arguments throws on its rank before any token moves, and on the others with the
/// same text; the buffer stays usable. A call that a rank misses throws kTimeout (kPeer if the rank
/// is known to be gone) and ends the use of the buffer: later calls throw the same error.
class EPBuffer {
 public:
  /// Collective. Throws kInvalidArgument that lists what differs between ranks.
  EPBuffer(std::shared_ptr<Bootstrap> bootstrap, const EPBufferOptions& options);
  ~EPBuffer();
  EPBuffer(const EPBuffer&) = delete;
  EPBuffer& operator=(const EPBuffer&) = delete;

  /// Bytes with which calls of this shape find room without asking the system for memory again.
  static BufferSizeHint size_hint(const Topology& logical, int num_max_tokens_per_rank, int hidden,
                                  int num_topk, bool use_fp8_dispatch,
                                  bool allow_multiple_reduction);

  PendingDispatch dispatch(const DispatchArgs& args);
  PendingCombine combine(const CombineArgs& args);

  /// Takes part in the next call only to say that this rank can't make it: the peers' call throws
  /// kPeer with `reason`. For callers that check arguments of their own before they call dispatch
  /// or combine.
  void refuse_call(const std::string& reason);

  /// Makes all ranks wait for each other, after the calls made so far. `stream`: the caller's,
  /// which then waits. CPU ranks have waited when this returns.
  Event barrier(void* stream = nullptr);

  /// The `CUstream` that asynchronous calls run on; null on CPU ranks.
  void* comm_stream();

  /// SMs of this rank's GPU; 0 on CPU ranks.
  int num_device_sms() const noexcept;

  /// A tensor `[num_rows, num_columns]` in this buffer's window, contents unspecified: expert
  /// outputs written there are read by the peers in place. Stays valid after destroy(). Local.
  /// `stream`: the caller's `CUstream` on CUDA ranks; while it is captured into a graph, the memory
  /// stays reserved for that graph.
  Tensor empty(std::int64_t num_rows, std::int64_t num_columns, DType dtype,
               void* stream = nullptr);

  /// Ends the use of the buffer on this rank, after the calls made so far. Local: waits for no
  /// peer. Peers that call it later get kPeer. Tensors that it lent stay valid. May be called
  /// again.
  void destroy();

  const EPBufferOptions& options() const noexcept;  ///< with num_bytes as chosen
  const Topology& physical_topology() const noexcept;
  const Topology& logical_topology() const noexcept;

 private:
  std::unique_ptr<EPBackend> backend_;
};

/// The number of SMs that keeps the links of a rank busy, from a balanced gate; even and at
/// least 4. `nvlink_gbs`, `rdma_gbs`, ...: GB/s of a rank, 0: the library's own figures. Host only.
/// f(G) = G * (1 - C(E - E/G, K) / C(E, K)) destinations of a token among G (expected, balanced
/// gate).
struct SmEstimateArgs {
  Topology physical, logical;
  int num_experts = 0, num_topk = 0;
  double rdma_gbs = 0, nvlink_gbs = 0, sm_read_gbs = 0, sm_write_gbs = 0;
  bool prefer_overlap_with_compute = true;
  int num_device_sms = 0;  ///< 0: no device limit
};
int theoretical_num_sms(const SmEstimateArgs& args);

/// Queue pairs that a call with `num_sms` can use: direct min(num_sms, 9), hybrid 16 a SM and one
/// more.
int theoretical_num_qps(int num_sms, bool allow_hybrid_mode, int num_allocated_qps);

}  // namespace deep_ep
