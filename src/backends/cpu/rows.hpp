#pragma once
// The two inner loops of the library: copying rows and summing BF16 rows.
#include <cstddef>
#include <cstdint>
#include <span>

namespace deep_ep::cpu {

/// How stores leave the core: through the caches, or past them for data that nobody reads soon.
enum class StoreMode { kCached, kStreaming };

/// Which mode pays for a call that writes `num_bytes` in all: past the caches once they can't hold
/// it.
StoreMode store_mode_for(std::int64_t num_bytes) noexcept;

/// Copies `num_bytes` that do not overlap; any alignment.
void copy_row(void* target, const void* source, std::size_t num_bytes, StoreMode mode) noexcept;

/// Orders streaming stores before a later release. Call it at the end of a thread's share of the
/// work.
void finish_streaming() noexcept;

/// Rows to be summed: groups of `group_sizes[g]` rows, one group after another in `rows`. A group
/// of several rows is summed in FP32 from +0 in order and rounded to BF16 first; then the groups
/// are summed in FP32 from +0 in order and rounded once (nearest even).
struct RowSum {
  std::span<const std::uint16_t* const> rows;
  std::span<const std::uint8_t> group_sizes;
};

/// Writes the sum of `sum` to `target`, `hidden` BF16 values; zeros when there are no rows.
void sum_rows(std::uint16_t* target, const RowSum& sum, std::size_t hidden,
              StoreMode mode) noexcept;

}  // namespace deep_ep::cpu
