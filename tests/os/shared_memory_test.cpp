#include "os/shared_memory.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <utility>

#include "support/errors.hpp"
#include "support/forked_process.hpp"

namespace deep_ep {
namespace {

using testing::error_from;
using testing::is_error;

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

std::int64_t allocated_bytes(const UniqueFd& fd) {
  struct stat status {};
  EXPECT_EQ(::fstat(fd.get(), &status), 0);
  return status.st_blocks * 512;
}

TEST(SharedMemoryTest, TakesMemoryOnlyForTouchedPages) {
  const UniqueFd fd = create_shared_memory("test", 1024 * kMiB);
  const Mapping mapping(fd.get(), 1024 * kMiB);
  EXPECT_EQ(allocated_bytes(fd), 0);
  mapping.data()[512 * kMiB] = std::byte{1};
  EXPECT_GT(allocated_bytes(fd), 0);
  EXPECT_LE(allocated_bytes(fd), 4 * kMiB);
}

TEST(SharedMemoryTest, IsSeenByEveryMappingAndProcess) {
  const UniqueFd fd = create_shared_memory("test", kMiB);
  const Mapping mapping(fd.get(), kMiB);
  testing::ForkedProcess child([&] { Mapping(fd.get(), kMiB).bytes().back() = std::byte{42}; });
  ASSERT_EQ(child.wait(), 0);
  EXPECT_EQ(mapping.bytes().back(), std::byte{42});
}

TEST(SharedMemoryTest, OutlivesItsDescriptor) {
  UniqueFd fd = create_shared_memory("test", kMiB);
  Mapping first(fd.get(), kMiB);
  fd.reset();
  const Mapping mapping = std::move(first);
  mapping.data()[0] = std::byte{1};
  EXPECT_EQ(mapping.num_bytes(), kMiB);
  EXPECT_FALSE(first);  // NOLINT(bugprone-use-after-move): that it is empty is the point
}

TEST(SharedMemoryTest, ReleasedPagesReadAsZerosAndTakeNoMemory) {
  const UniqueFd fd = create_shared_memory("test", 4 * kMiB);
  const Mapping mapping(fd.get(), 4 * kMiB);
  for (std::byte& byte : mapping.bytes()) byte = std::byte{7};
  const std::int64_t before = allocated_bytes(fd);
  release_pages(fd.get(), 0, 2 * kMiB);
  EXPECT_EQ(mapping.data()[0], std::byte{0});
  EXPECT_EQ(mapping.data()[2 * kMiB], std::byte{7});
  // nearly: the kernel counts some pages of its own
  EXPECT_NEAR(static_cast<double>(before - allocated_bytes(fd)), 2.0 * kMiB, 65536.0);
  release_pages(fd.get(), 0, 0);
}

TEST(SharedMemoryTest, CannotBeTruncatedByAPeer) {
  const UniqueFd fd = create_shared_memory("test", kMiB);
  EXPECT_EQ(::ftruncate(fd.get(), 0), -1);
  EXPECT_EQ(errno, EPERM);
}

TEST(SharedMemoryTest, RefusesToMapBeyondTheEnd) {
  const UniqueFd fd = create_shared_memory("test", kMiB);
  EXPECT_TRUE(is_error(error_from([&] { Mapping(fd.get(), kMiB + 1); }),
                       ErrorCode::kInvalidArgument, "1048576 bytes is too small to map 1048577"));
}

TEST(SharedMemoryTest, NamesCallAndBytesAskedWhenTheSystemRefuses) {
  const std::string long_name(300, 'x');
  EXPECT_TRUE(is_error(error_from([&] { create_shared_memory(long_name.c_str(), 4096); }),
                       ErrorCode::kSystem, "for 4096 bytes: EINVAL (22)"));
  const std::int64_t beyond_address_space = std::int64_t{1} << 60;
  const UniqueFd fd = create_shared_memory("test", beyond_address_space);
  EXPECT_TRUE(is_error(error_from([&] { Mapping(fd.get(), beyond_address_space); }),
                       ErrorCode::kSystem, "of 1152921504606846976 bytes: ENOMEM (12)"));
  EXPECT_TRUE(is_error(error_from([] { release_pages(-1, 0, 4096); }), ErrorCode::kSystem,
                       "of 4096 bytes at 0: EBADF (9)"));
  EXPECT_TRUE(is_error(error_from([] { Mapping(-1, 4096); }), ErrorCode::kSystem, "EBADF (9)"));
}

TEST(SharedMemoryTest, RefusesSizesThatAreNone) {
  EXPECT_EQ(error_from([] { create_shared_memory("test", 0); }).code(),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(error_from([] { Mapping(-1, 0); }).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(error_from([] { release_pages(-1, -1, 1); }).code(), ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace deep_ep
