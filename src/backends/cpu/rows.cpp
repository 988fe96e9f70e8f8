#include "backends/cpu/rows.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/rows.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>  // compiles this file once for each instruction set
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace deep_ep::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Bytes = hn::ScalableTag<std::uint8_t>;
using Words = hn::ScalableTag<std::uint32_t>;
using Floats = hn::ScalableTag<float>;
using WordVec = hn::Vec<Words>;
using FloatVec = hn::Vec<Floats>;

void StreamCopy(std::uint8_t* HWY_RESTRICT target, const std::uint8_t* HWY_RESTRICT source,
                std::size_t num_bytes) {
  const Bytes d;
  const std::size_t lanes = hn::Lanes(d);
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(target) % lanes;
  const std::size_t head = misaligned == 0 ? 0 : lanes - misaligned;
  if (num_bytes < head + 4 * lanes) {
    std::memcpy(target, source, num_bytes);
    return;
  }
  std::memcpy(target, source, head);
  std::size_t i = head;
  for (; i + 4 * lanes <= num_bytes; i += 4 * lanes) {
    const auto a = hn::LoadU(d, source + i);
    const auto b = hn::LoadU(d, source + i + lanes);
    const auto c = hn::LoadU(d, source + i + 2 * lanes);
    const auto e = hn::LoadU(d, source + i + 3 * lanes);
    hn::Stream(a, d, target + i);
    hn::Stream(b, d, target + i + lanes);
    hn::Stream(c, d, target + i + 2 * lanes);
    hn::Stream(e, d, target + i + 3 * lanes);
  }
  std::memcpy(target + i, source + i, num_bytes - i);
}

// Two BF16 values ride in one 32-bit word. As floats they are the word shifted left by 16 (the even
// value) and the word with its low half cleared (the odd value), so no shuffle is needed either
// way.
HWY_INLINE FloatVec Even(WordVec words) { return hn::BitCast(Floats(), hn::ShiftLeft<16>(words)); }
HWY_INLINE FloatVec Odd(WordVec words) {
  return hn::BitCast(Floats(), hn::And(words, hn::Set(Words(), 0xffff0000u)));
}

struct Pair {
  FloatVec even, odd;
};

HWY_INLINE void Accumulate(Pair& sum, WordVec words) {
  sum.even = hn::Add(sum.even, Even(words));
  sum.odd = hn::Add(sum.odd, Odd(words));
}

// The bits of a float with its upper half rounded to BF16, nearest even. A sum of BF16 values that
// is NaN has a lower half of zeros, so nothing carries into the upper one and it stays that NaN.
HWY_INLINE WordVec RoundUpper(FloatVec value) {
  const Words d;
  const WordVec bits = hn::BitCast(d, value);
  const WordVec last = hn::And(hn::ShiftRight<16>(bits), hn::Set(d, 1u));
  return hn::Add(hn::Add(bits, hn::Set(d, 0x7fffu)), last);
}

HWY_INLINE WordVec Pack(const Pair& sum) {
  const WordVec odd = hn::And(RoundUpper(sum.odd), hn::Set(Words(), 0xffff0000u));
  return hn::Or(hn::ShiftRight<16>(RoundUpper(sum.even)), odd);
}

// Sums kNum vectors of words of all rows, starting at value `offset`. Several at a time hide how
// long each addition takes.
template <bool kHasGroups, std::size_t kNum>
HWY_INLINE void SumAt(std::uint32_t* HWY_RESTRICT target, const RowSum& sum, std::size_t offset,
                      bool streams) {
  const Words d;
  const std::size_t lanes = hn::Lanes(d);
  const Pair zero = {hn::Zero(Floats()), hn::Zero(Floats())};
  Pair total[kNum];
  std::fill_n(total, kNum, zero);
  const auto add = [&](Pair* pairs, const std::uint16_t* row) HWY_ATTR {
    const auto* words = reinterpret_cast<const std::uint32_t*>(row + offset);
    for (std::size_t i = 0; i < kNum; ++i) Accumulate(pairs[i], hn::LoadU(d, words + i * lanes));
  };
  if constexpr (!kHasGroups) {
    for (const std::uint16_t* row : sum.rows) add(total, row);
  } else {
    const std::uint16_t* const* row = sum.rows.data();
    for (const std::uint8_t size : sum.group_sizes) {
      if (size == 1) {
        add(total, *row++);
        continue;
      }
      Pair group[kNum];
      std::fill_n(group, kNum, zero);
      for (int i = 0; i < size; ++i) add(group, *row++);
      for (std::size_t i = 0; i < kNum; ++i) Accumulate(total[i], Pack(group[i]));
    }
  }
  for (std::size_t i = 0; i < kNum; ++i) {
    if (streams) {
      hn::Stream(Pack(total[i]), d, target + i * lanes);
    } else {
      hn::StoreU(Pack(total[i]), d, target + i * lanes);
    }
  }
}

template <bool kHasGroups>
void SumAll(std::uint16_t* HWY_RESTRICT target, const RowSum& sum, std::size_t hidden,
            bool streams) {
  constexpr std::size_t kNum = 2;
  const std::size_t lanes = 2 * hn::Lanes(Words());  // values
  const auto words = [](std::uint16_t* values) { return reinterpret_cast<std::uint32_t*>(values); };
  streams = streams && reinterpret_cast<std::uintptr_t>(target) % (2 * lanes) == 0;
  std::size_t i = 0;
  for (; i + kNum * lanes <= hidden; i += kNum * lanes) {
    SumAt<kHasGroups, kNum>(words(target + i), sum, i, streams);
  }
  for (; i + lanes <= hidden; i += lanes) {
    SumAt<kHasGroups, 1>(words(target + i), sum, i, streams);
  }
  if (i == hidden) return;
  // The rest goes through one vector's worth of padded copies.
  constexpr std::size_t kMostLanes = HWY_MAX_BYTES / 2;
  constexpr std::size_t kMostRows = 64;  // lanes, and two biases
  std::uint16_t padded[kMostRows][kMostLanes] = {};
  const std::uint16_t* rows[kMostRows];
  const std::size_t num_rows = sum.rows.size();
  for (std::size_t row = 0; row < num_rows; ++row) {
    std::memcpy(padded[row], sum.rows[row] + i, 2 * (hidden - i));
    rows[row] = padded[row];
  }
  const RowSum rest = {.rows = {rows, num_rows}, .group_sizes = sum.group_sizes};
  std::uint16_t last[kMostLanes];
  SumAt<kHasGroups, 1>(words(last), rest, 0, false);
  std::memcpy(target + i, last, 2 * (hidden - i));
}

void Sum(std::uint16_t* target, const RowSum& sum, std::size_t hidden, bool streams) {
  if (sum.group_sizes.size() == sum.rows.size()) {
    SumAll<false>(target, sum, hidden, streams);
  } else {
    SumAll<true>(target, sum, hidden, streams);
  }
}

}  // namespace deep_ep::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace deep_ep::cpu {

HWY_EXPORT(StreamCopy);
HWY_EXPORT(Sum);

namespace {

// ThreadSanitizer and AddressSanitizer do not see streaming stores, so their builds do without.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kCanStream = false;
#else
constexpr bool kCanStream = true;
#endif

// About the last-level cache that one rank may hope for.
constexpr std::int64_t kCacheBytes = std::int64_t{8} << 20;

}  // namespace

StoreMode store_mode_for(std::int64_t num_bytes) noexcept {
  return kCanStream && num_bytes > kCacheBytes ? StoreMode::kStreaming : StoreMode::kCached;
}

void copy_row(void* target, const void* source, std::size_t num_bytes, StoreMode mode) noexcept {
  if (mode == StoreMode::kCached) {
    if (num_bytes != 0) std::memcpy(target, source, num_bytes);
    return;
  }
  HWY_DYNAMIC_DISPATCH(StreamCopy)
  (static_cast<std::uint8_t*>(target), static_cast<const std::uint8_t*>(source), num_bytes);
}

void finish_streaming() noexcept { hwy::FlushStream(); }

void sum_rows(std::uint16_t* target, const RowSum& sum, std::size_t hidden,
              StoreMode mode) noexcept {
  HWY_DYNAMIC_DISPATCH(Sum)(target, sum, hidden, mode == StoreMode::kStreaming);
}

}  // namespace deep_ep::cpu
#endif  // HWY_ONCE
