#pragma once
// BF16 values as bits, two in a word, and their sums in FP32.
#include <cstdint>

namespace deep_ep::device {

__device__ inline float even_of(std::uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float odd_of(std::uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

/// Rounds to BF16, nearest even, in the upper half; the lower half is what it may be. A sum of BF16
/// values that is NaN has a lower half of ones (0x7fffffff), which must not carry.
__device__ inline std::uint32_t round_upper(float value) {
  const std::uint32_t bits = __float_as_uint(value);
  if (value != value) return bits;
  return bits + 0x7fffu + ((bits >> 16) & 1u);
}

__device__ inline std::uint32_t pack(float even, float odd) {
  return (round_upper(even) >> 16) | (round_upper(odd) & 0xffff0000u);
}

/// A vector of `kPairs` words of two values each.
template <int kPairs>
struct Sum {
  float even[kPairs], odd[kPairs];

  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) even[i] = odd[i] = 0.0f;
  }
  __device__ void add(const std::uint32_t (&pairs)[kPairs]) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      even[i] = __fadd_rn(even[i], even_of(pairs[i]));
      odd[i] = __fadd_rn(odd[i], odd_of(pairs[i]));
    }
  }
  __device__ void round(std::uint32_t (&pairs)[kPairs]) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) pairs[i] = pack(even[i], odd[i]);
  }
};

/// Some rows of one token, in the order in which they are added. Groups: a row that ends one closes
/// the rows since the group before it; their sum is rounded before it is added.
struct Terms {
  const std::uint8_t* const* rows;
  int num_rows;
  std::uint64_t ends_group;  ///< bit i: row i ends its group; all bits: no rounding in between
};

template <typename Word>
__device__ inline void load_pairs(std::uint32_t (&pairs)[sizeof(Word) < 4 ? 1 : sizeof(Word) / 4],
                                  const std::uint8_t* row, std::int64_t word_idx) {
  const Word word = reinterpret_cast<const Word*>(row)[word_idx];
  if constexpr (sizeof(Word) == 16) {
    pairs[0] = word.x;
    pairs[1] = word.y;
    pairs[2] = word.z;
    pairs[3] = word.w;
  } else if constexpr (sizeof(Word) == 8) {
    pairs[0] = word.x;
    pairs[1] = word.y;
  } else {
    pairs[0] = word;
  }
}

template <typename Word>
__device__ inline void store_pairs(const std::uint32_t (&pairs)[sizeof(Word) < 4 ? 1
                                                                                 : sizeof(Word) / 4],
                                   std::uint8_t* row, std::int64_t word_idx) {
  Word& word = reinterpret_cast<Word*>(row)[word_idx];
  if constexpr (sizeof(Word) == 16) {
    word = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  } else if constexpr (sizeof(Word) == 8) {
    word = make_uint2(pairs[0], pairs[1]);
  } else {
    word = static_cast<Word>(pairs[0]);
  }
}

/// One warp: writes the sum of the terms to `target`, `num_bytes` of BF16 values. Words of 2 bytes
/// hold one value: the odd one of each pair is then a zero.
template <typename Word>
__device__ inline void warp_sum_rows(std::uint8_t* target, const Terms& terms,
                                     std::int64_t num_bytes) {
  constexpr int kPairs = sizeof(Word) < 4 ? 1 : sizeof(Word) / 4;
  constexpr int kAhead = 2;  // loads under way
  const std::int64_t num_words = num_bytes / static_cast<std::int64_t>(sizeof(Word));
  for (std::int64_t place = threadIdx.x % 32; place < num_words; place += 32) {
    Sum<kPairs> total, group;
    total.clear();
    group.clear();
    bool has_open_group = false;
    for (int first = 0; first < terms.num_rows; first += kAhead) {
      std::uint32_t pairs[kAhead][kPairs];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i < terms.num_rows) load_pairs<Word>(pairs[i], terms.rows[first + i], place);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (first + i >= terms.num_rows) continue;
        const bool ends = ((terms.ends_group >> (first + i)) & 1) != 0;
        if (ends && !has_open_group) {  // a group of one row
          total.add(pairs[i]);
          continue;
        }
        group.add(pairs[i]);
        has_open_group = !ends;
        if (ends) {
          group.round(pairs[i]);
          total.add(pairs[i]);
          group.clear();
        }
      }
    }
    std::uint32_t rounded[kPairs];
    total.round(rounded);
    store_pairs<Word>(rounded, target, place);
  }
}

/// `function` with a word of BF16 values: 16, 8, 4 or 2 bytes.
template <typename Function>
__device__ inline void with_bf16_word(int width, const Function& function) {
  if (width >= 16) {
    function(uint4{});
  } else if (width == 8) {
    function(uint2{});
  } else if (width == 4) {
    function(std::uint32_t{});
  } else {
    function(std::uint16_t{});
  }
}

}  // namespace deep_ep::device
