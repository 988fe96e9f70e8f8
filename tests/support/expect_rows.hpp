#pragma once
// Compares tensors bit by bit; a mismatch prints rank, row, where the row comes from, element and
// values.
#include <gtest/gtest.h>

#include <concepts>
#include <cstdint>
#include <cstring>
#include <functional>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "core/float_formats.hpp"
#include "deep_ep/tensor.hpp"

namespace deep_ep::testing {

/// A value and its bits, as a failure shows them. 16 bits are shown as BF16.
template <typename T>
std::string show(T value) {
  std::ostringstream text;
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  if constexpr (std::same_as<T, std::uint16_t>) {
    text << float_from_bf16(value);
  } else if constexpr (std::is_arithmetic_v<T>) {
    text << +value;
  }
  text << " (0x" << std::hex << bits << ")";
  return text.str();
}

/// What is compared, and how its rows are told apart.
struct RowsToCompare {
  std::string name;
  int rank_idx = 0;
  std::int64_t num_columns = 1;
  std::function<bool(std::int64_t row)> is_skipped = nullptr;  ///< rows of unspecified contents
  std::function<std::string(std::int64_t row)> describe = nullptr;
};

/// Expects `actual`, of any strides, to begin with the rows of `expected`, which is contiguous.
template <typename T>
void expect_rows(const RowsToCompare& rows, const TensorView& actual,
                 const std::vector<T>& expected) {
  if (expected.empty()) return;
  const auto num_rows = static_cast<std::int64_t>(expected.size()) / rows.num_columns;
  ASSERT_EQ(size_of(actual.dtype), static_cast<std::int64_t>(sizeof(T))) << rows.name;
  ASSERT_EQ(actual.shape[1], rows.num_columns) << rows.name;
  ASSERT_GE(actual.shape[0], num_rows) << rows.name;
  int num_mismatches = 0;
  std::ostringstream text;
  for (std::int64_t row = 0; row < num_rows; ++row) {
    if (rows.is_skipped && rows.is_skipped(row)) continue;
    for (std::int64_t column = 0; column < rows.num_columns; ++column) {
      const std::int64_t position = row * actual.strides[0] + column * actual.strides[1];
      const T& seen = actual.as<const T>()[position];
      const T& wanted = expected[static_cast<std::size_t>(row * rows.num_columns + column)];
      if (std::memcmp(&seen, &wanted, sizeof(T)) == 0) continue;
      if (++num_mismatches > 3) continue;
      text << "\n  rank " << rows.rank_idx << ", row " << row;
      if (rows.describe) text << " (" << rows.describe(row) << ")";
      text << ", element " << column << ": got " << show(seen) << ", expected " << show(wanted);
    }
  }
  EXPECT_EQ(num_mismatches, 0) << rows.name << text.str();
}

}  // namespace deep_ep::testing
