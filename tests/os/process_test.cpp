#include "os/process.hpp"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <thread>

#include "support/errors.hpp"
#include "support/forked_process.hpp"

namespace deep_ep {
namespace {

using testing::error_from;
using testing::ForkedProcess;
using testing::is_error;

TEST(ProcessTest, RandomIdsDiffer) { EXPECT_NE(random_id(), random_id()); }

TEST(ProcessTest, WritesAnIdAsHexadecimalDigits) {
  Id128 id{};
  id[0] = 0x0f;
  id[15] = 0xa0;
  EXPECT_EQ(hex(id), "0f0000000000000000000000000000a0");
}

TEST(ProcessTest, HasOneIdentityInAllItsThreads) {
  const Id128 identity = process_identity();
  std::jthread([&] { EXPECT_EQ(process_identity(), identity); }).join();
}

TEST(ProcessTest, AForkedChildHasAnotherIdentity) {
  const Id128 identity = process_identity();
  ForkedProcess child([&] { EXPECT_NE(process_identity(), identity); });
  EXPECT_EQ(child.wait(), 0);
  EXPECT_EQ(process_identity(), identity);
}

TEST(ProcessTest, AForkedChildKnowsThatItDidNotMakeAnObject) {
  const OwnerProcess owner;
  EXPECT_TRUE(owner.is_current());
  owner.require_current("the buffer");
  ForkedProcess child([&] {
    EXPECT_FALSE(owner.is_current());
    EXPECT_TRUE(is_error(error_from([&] { owner.require_current("the buffer"); }),
                         ErrorCode::kInvalidArgument, "the buffer was made by process"));
  });
  EXPECT_EQ(child.wait(), 0);
}

TEST(ProcessTest, BootIdIsAUuidThatDoesNotChange) {
  EXPECT_EQ(boot_id().size(), 36U);
  EXPECT_EQ(boot_id(), boot_id());
}

TEST(ProcessTest, PidfdSeesTheEndOfAProcessBeforeItIsReaped) {
  ForkedProcess child([] { ::sleep(60); });
  const UniqueFd pidfd = open_pidfd(child.pid());
  if (!pidfd) GTEST_SKIP() << "this system has no pidfd";
  EXPECT_FALSE(has_exited(pidfd));
  child.kill();
  for (int i = 0; i < 1000 && !has_exited(pidfd); ++i) ::usleep(1000);
  EXPECT_TRUE(has_exited(pidfd));
}

TEST(ProcessTest, PidfdOfAProcessThatIsGoneIsAPeerError) {
  ForkedProcess child([] {});
  const pid_t pid = child.pid();
  child.wait();
  EXPECT_TRUE(is_error(error_from([&] { open_pidfd(pid); }), ErrorCode::kPeer, "has ended"));
}

}  // namespace
}  // namespace deep_ep
