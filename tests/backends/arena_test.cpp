#include "backends/arena.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "backends/cpu/window.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::cpu {
namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

struct ArenaTest : testing::Test {
  Topology topology{.rank_idx = 0, .num_ranks = 1, .num_scaleout_ranks = 1, .num_scaleup_ranks = 1};
  WindowLayout layout{topology};
  std::shared_ptr<Window> window = Window::create(layout, layout.arena + 64 * kMiB);
  std::shared_ptr<Arena> arena =
      make_arena(window, layout.arena, layout.arena + 64 * kMiB, 4 * kMiB);

  std::int64_t resident_bytes() const {
    struct stat status {};
    EXPECT_EQ(fstat(window->fd(), &status), 0);
    return std::int64_t{status.st_blocks} * 512;
  }
};

TEST_F(ArenaTest, BlocksDoNotOverlapAndAllComeBack) {
  std::mt19937 random(3);
  std::vector<std::pair<std::shared_ptr<void>, std::int64_t>> blocks;
  for (int i = 0; i < 2000; ++i) {
    if (blocks.size() > 20 || (random() % 2 == 0 && !blocks.empty())) {
      blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(random() % blocks.size()));
    } else {
      const std::int64_t size = 1 + static_cast<std::int64_t>(random() % 100000);
      blocks.emplace_back(arena->lend(size), size);
      ASSERT_GE(arena->offset_of(blocks.back().first.get(), size), layout.arena);
    }
    for (std::size_t a = 0; a < blocks.size(); ++a) {
      for (std::size_t b = 0; b < a; ++b) {
        const auto* first = static_cast<std::byte*>(blocks[a].first.get());
        const auto* second = static_cast<std::byte*>(blocks[b].first.get());
        ASSERT_TRUE(first + blocks[a].second <= second || second + blocks[b].second <= first);
      }
    }
  }
  blocks.clear();
  EXPECT_EQ(arena->num_lent_bytes(), 0);
  EXPECT_NO_THROW(arena->lend(64 * kMiB)) << "the gaps must have become one again";
}

TEST_F(ArenaTest, SaysHowMuchIsHeldWhenThereIsNoRoom) {
  const auto held = arena->lend(60 * kMiB);
  try {
    arena->lend(8 * kMiB);
    FAIL() << "no Error was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kSystem);
    EXPECT_NE(std::string(error.what()).find(std::to_string(60 * kMiB)), std::string::npos)
        << error.what();
  }
}

TEST_F(ArenaTest, KeepsPagesUpToItsLimitAndGivesTheRestBack) {
  auto block = arena->lend(16 * kMiB);
  std::memset(block.get(), 1, 16 * kMiB);
  EXPECT_GE(resident_bytes(), 16 * kMiB);
  block.reset();
  EXPECT_LE(resident_bytes(), 5 * kMiB);
  EXPECT_GE(resident_bytes(), 3 * kMiB);
}

TEST_F(ArenaTest, ABlockOutlivesTheArena) {
  const auto block = arena->lend(kMiB);
  arena.reset();
  window.reset();
  std::memset(block.get(), 7, kMiB);
  EXPECT_EQ(static_cast<unsigned char*>(block.get())[kMiB - 1], 7);
}

TEST_F(ArenaTest, KnowsWhatLiesInIt) {
  const auto block = arena->lend(100);
  int outside = 0;
  EXPECT_EQ(arena->offset_of(&outside, 4), -1);
  EXPECT_EQ(arena->offset_of(block.get(), 65 * kMiB), -1) << "longer than the arena";
  EXPECT_EQ(arena->lend(0), nullptr);
}

}  // namespace
}  // namespace deep_ep::cpu
