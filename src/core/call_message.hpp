#pragma once
// What a rank tells the others about a call before any row moves, and what they make of it.
//
// A message is bytes in memory that a peer wrote, so reading it checks everything.
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/ep_plan.hpp"

namespace deep_ep {

enum class Operation : std::uint32_t {
  kDispatch = 1,
  kCachedDispatch,
  kCombine,
  kBarrier,
  kRefused
};

const char* name_of(Operation operation) noexcept;

/// Values of a call that must be equal on all ranks; which fields an operation uses, the others
/// leave 0.
struct CallTerms {
  std::int64_t operation = 0;
  std::int64_t row_bytes = 0;
  std::int64_t x_dtype = 0;
  std::int64_t num_topk = 0;
  std::int64_t num_sf_packs = 0;
  std::int64_t num_experts = 0;
  std::int64_t num_max_tokens_per_rank = 0;
  std::int64_t expert_alignment = 0;
  std::int64_t do_expand = 0;
  std::int64_t has_weights = 0;
  std::int64_t idx_bytes = 0;

  bool operator==(const CallTerms&) const = default;
};
CallTerms terms_of(const DispatchPlan& plan);
CallTerms terms_of(const CombinePlan& plan);

/// The fixed part of a message; counts follow it.
struct CallHeader {
  std::uint64_t call = 0;  ///< number of the call in its buffer, from 1
  CallTerms terms;
  std::int64_t num_tokens = 0;  ///< of the sender
  std::int64_t x_offset = -1;   ///< combine: where x lies in the sender's window, -1 without rows
  std::int64_t weights_offset = -1;   ///< combine: where topk_weights lie there, -1 without
  std::int64_t num_counts = 0;        ///< int32 values after the header
  std::array<char, 512> reason = {};  ///< of a refused call, null-terminated
};

/// Bytes that hold any message of a group.
constexpr std::int64_t max_message_bytes(int num_ranks) noexcept {
  return align_up(static_cast<std::int64_t>(sizeof(CallHeader)) + 4 * (2 * num_ranks + kMaxExperts),
                  64);
}

/// Writes a message to `target`.
void write_message(std::span<std::byte> target, const CallHeader& header,
                   std::span<const std::int32_t> counts);

/// Reads the header of a message of `rank_idx`. Throws kPeer if it can't be one of call `call`.
CallHeader read_header(std::span<const std::byte> message, std::uint64_t call, int rank_idx);

/// Reads the counts that belong to `header` into `row` (shape.num_counts() values). Throws kPeer if
/// they are no possible counts of `header.num_tokens` tokens.
void read_counts(std::span<const std::byte> message, const CallHeader& header,
                 const RoutingShape& shape, int rank_idx, std::span<std::int32_t> row);

/// What is wrong with a call, seen from the headers of all ranks (the same on every rank): the
/// reason of the first rank that refused, or which ranks differ in which terms; nothing if all
/// agree.
struct CallProblem {
  bool is_refusal = false;
  std::string text;
};
std::optional<CallProblem> find_problem(std::span<const CallHeader> headers);

}  // namespace deep_ep
