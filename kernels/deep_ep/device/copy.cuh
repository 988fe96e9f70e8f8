#pragma once
// Copies by ordinary loads and stores, a warp a row.
#include <cstdint>

namespace deep_ep::device {

template <int kWidth>
struct WordOf;
template <>
struct WordOf<16> {
  using Type = uint4;
};
template <>
struct WordOf<8> {
  using Type = uint2;
};
template <>
struct WordOf<4> {
  using Type = std::uint32_t;
};
template <>
struct WordOf<2> {
  using Type = std::uint16_t;
};
template <>
struct WordOf<1> {
  using Type = std::uint8_t;
};

/// Calls `function` with a value whose type is the word of `width` bytes (16, 8, 4, 2 or 1).
template <typename Function>
__device__ inline void with_word(int width, const Function& function) {
  switch (width) {
    case 16:
      function(uint4{});
      break;
    case 8:
      function(uint2{});
      break;
    case 4:
      function(std::uint32_t{});
      break;
    case 2:
      function(std::uint16_t{});
      break;
    default:
      function(std::uint8_t{});
  }
}

/// One warp: copies a row to each of the targets that threads hold (null: none), reading it once.
template <typename Word>
__device__ inline void warp_copy_to_all(const std::uint8_t* source, std::uint8_t* target_of_thread,
                                        std::int64_t num_bytes) {
  const unsigned targets = __ballot_sync(0xffffffff, target_of_thread != nullptr);
  const auto thread = static_cast<std::int64_t>(threadIdx.x % 32);
  const std::int64_t num_words = num_bytes / static_cast<std::int64_t>(sizeof(Word));
  constexpr int kUnroll = 4;
  const auto* const from = reinterpret_cast<const Word*>(source);
  for (std::int64_t first = 0; first < num_words; first += 32 * kUnroll) {
    Word words[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const std::int64_t place = first + 32 * i + thread;
      if (place < num_words) words[i] = from[place];
    }
    for (unsigned left = targets; left != 0; left &= left - 1) {
      const auto address = reinterpret_cast<std::uint64_t>(target_of_thread);
      auto* const to = reinterpret_cast<Word*>(
          __shfl_sync(0xffffffff, address, __ffs(static_cast<int>(left)) - 1));
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const std::int64_t place = first + 32 * i + thread;
        if (place < num_words) to[place] = words[i];
      }
    }
  }
}

}  // namespace deep_ep::device
