#include "backends/cpu/rows.hpp"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "core/float_formats.hpp"

namespace deep_ep::cpu {
namespace {

// The slow way, from the words of rows.hpp.
std::uint16_t sum_of(const std::vector<std::vector<std::uint16_t>>& rows,
                     const std::vector<std::uint8_t>& groups, std::size_t column) {
  float total = 0.0F;
  std::size_t row = 0;
  for (const std::uint8_t size : groups) {
    if (size == 1) {
      total += float_from_bf16(rows[row++][column]);
      continue;
    }
    float group = 0.0F;
    for (int i = 0; i < size; ++i) group += float_from_bf16(rows[row++][column]);
    total += float_from_bf16(bf16_from_float(group));
  }
  return bf16_from_float(total);
}

class RowSumTest : public testing::TestWithParam<std::vector<std::uint8_t>> {};

TEST_P(RowSumTest, EqualsTheSlowSumForEveryWidthAndMode) {
  std::mt19937 random(1);
  std::size_t num_rows = 0;
  for (const std::uint8_t size : GetParam()) num_rows += size;
  for (const std::size_t hidden : {1U, 2U, 7U, 8U, 15U, 16U, 17U, 33U, 64U, 129U, 2880U}) {
    std::vector<std::vector<std::uint16_t>> rows(num_rows, std::vector<std::uint16_t>(hidden));
    std::vector<const std::uint16_t*> pointers;
    for (auto& row : rows) {
      for (auto& value : row)
        value = static_cast<std::uint16_t>(random());  // NaN and Inf among them
      pointers.push_back(row.data());
    }
    for (const StoreMode mode : {StoreMode::kCached, StoreMode::kStreaming}) {
      std::vector<std::uint16_t> result(hidden + 1, 0xabcd);
      sum_rows(result.data(), {.rows = pointers, .group_sizes = GetParam()}, hidden, mode);
      finish_streaming();
      for (std::size_t i = 0; i < hidden; ++i) {
        const std::uint16_t expected = sum_of(rows, GetParam(), i);
        if (float_from_bf16(expected) != float_from_bf16(expected)) {
          ASSERT_NE(float_from_bf16(result[i]), float_from_bf16(result[i]))
              << "hidden " << hidden << " at " << i;
        } else {
          ASSERT_EQ(result[i], expected) << "hidden " << hidden << " at " << i;
        }
      }
      ASSERT_EQ(result[hidden], 0xabcd) << "wrote past the row";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Groups, RowSumTest,
    testing::Values(std::vector<std::uint8_t>{}, std::vector<std::uint8_t>{1},
                    std::vector<std::uint8_t>{1, 1}, std::vector<std::uint8_t>{2},
                    std::vector<std::uint8_t>{1, 3, 1, 2}, std::vector<std::uint8_t>(8, 1),
                    std::vector<std::uint8_t>(34, 1), std::vector<std::uint8_t>{1, 1, 32}));

TEST(CopyRowTest, CopiesAnyAlignmentAndLength) {
  std::vector<unsigned char> source(600);
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<unsigned char>(i * 7 + 1);
  for (const StoreMode mode : {StoreMode::kCached, StoreMode::kStreaming}) {
    for (std::size_t shift = 0; shift < 33; ++shift) {
      for (const std::size_t size : {0U, 1U, 31U, 128U, 129U, 255U, 500U}) {
        std::vector<unsigned char> target(700, 0xee);
        copy_row(target.data() + shift, source.data() + shift / 2, size, mode);
        finish_streaming();
        for (std::size_t i = 0; i < target.size(); ++i) {
          const bool is_inside = i >= shift && i < shift + size;
          ASSERT_EQ(target[i], is_inside ? source[i - shift + shift / 2] : 0xee)
              << "shift " << shift << " size " << size << " at " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace deep_ep::cpu
