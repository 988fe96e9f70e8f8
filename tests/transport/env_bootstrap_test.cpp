#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>

#include "deep_ep/bootstrap.hpp"
#include "support/errors.hpp"

namespace deep_ep {
namespace {

using testing::error_from;
using testing::is_error;

class EnvBootstrapTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "EP_HOST_ID"}) {
      ::unsetenv(name);
    }
  }
  void TearDown() override { SetUp(); }
};

TEST_F(EnvBootstrapTest, ReadsWhatTheLauncherSet) {
  ::setenv("RANK", "0", 1);
  ::setenv("WORLD_SIZE", "1", 1);
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  ::setenv("MASTER_PORT", "29500", 1);
  ::setenv("EP_HOST_ID", "node7", 1);
  const auto bootstrap = make_env_bootstrap();
  EXPECT_EQ(bootstrap->rank_idx(), 0);
  EXPECT_EQ(bootstrap->num_ranks(), 1);
  EXPECT_EQ(bootstrap->host_id(), "node7");
}

TEST_F(EnvBootstrapTest, NamesEveryVariableThatIsMissingOrNoNumber) {
  ::setenv("RANK", "first", 1);
  ::setenv("WORLD_SIZE", "-2", 1);
  const Error error = error_from([] { make_env_bootstrap(); });
  EXPECT_TRUE(
      is_error(error, ErrorCode::kInvalidArgument,
               "RANK must be an integer of at least 0, got 'first'; WORLD_SIZE must be an "
               "integer of at least 0, got '-2'; MASTER_ADDR is not set; MASTER_PORT is not "
               "set"));
}

TEST_F(EnvBootstrapTest, TheHostIsTheKernelsUnlessConfigured) {
  const std::string boot = default_host_id();
  EXPECT_EQ(boot.size(), 36U);
  ::setenv("EP_HOST_ID", "node7", 1);
  EXPECT_EQ(default_host_id(), "node7");
}

}  // namespace
}  // namespace deep_ep
