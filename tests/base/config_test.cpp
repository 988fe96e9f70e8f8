#include "base/config.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>

#include "support/errors.hpp"

namespace deep_ep {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::error_from;
using testing::is_error;

class ConfigTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const config::Variable& variable : config::kVariables) ::unsetenv(variable.name);
  }
  void TearDown() override { SetUp(); }
};

TEST_F(ConfigTest, HasTheDocumentedDefaults) {
  EXPECT_EQ(config::host_id(), std::nullopt);
  EXPECT_EQ(config::timeout_or(seconds(7)), seconds(7));
  EXPECT_EQ(config::buffer_debug(), 0);
  EXPECT_EQ(config::cpu_threads(), 0);
  EXPECT_EQ(config::test_delay_us(), 0);
}

TEST_F(ConfigTest, ReadsAVariableWhenItIsUsed) {
  ::setenv("EP_HOST_ID", "a", 1);
  EXPECT_EQ(config::host_id(), "a");
  ::setenv("EP_HOST_ID", "b", 1);
  EXPECT_EQ(config::host_id(), "b");
  ::setenv("EP_TIMEOUT_SECS", "0.25", 1);
  EXPECT_EQ(config::timeout_or(seconds(7)), milliseconds(250));
  ::setenv("EP_CPU_THREADS", "3", 1);
  EXPECT_EQ(config::cpu_threads(), 3);
}

TEST_F(ConfigTest, TakesAnEmptyValueAsUnset) {
  ::setenv("EP_HOST_ID", "", 1);
  ::setenv("EP_TIMEOUT_SECS", "", 1);
  EXPECT_EQ(config::host_id(), std::nullopt);
  EXPECT_EQ(config::timeout_or(seconds(7)), seconds(7));
}

TEST_F(ConfigTest, RefusesBadTimeoutsByNameAndValue) {
  for (const char* value : {"0", "-1", "nan", "inf", "1e10", "5s", " 5", "x"}) {
    ::setenv("EP_TIMEOUT_SECS", value, 1);
    const Error error = error_from([] { config::timeout_or(seconds(7)); });
    EXPECT_TRUE(is_error(error, ErrorCode::kInvalidArgument, "EP_TIMEOUT_SECS"));
    EXPECT_TRUE(is_error(error, ErrorCode::kInvalidArgument, std::string("'") + value + "'"));
  }
}

TEST_F(ConfigTest, RefusesBadIntegersByNameAndValue) {
  for (const char* value : {"-1", "1025", "1.5", "many", "99999999999999999999"}) {
    ::setenv("EP_CPU_THREADS", value, 1);
    const Error error = error_from([] { config::cpu_threads(); });
    EXPECT_TRUE(is_error(error, ErrorCode::kInvalidArgument, "EP_CPU_THREADS"));
    EXPECT_TRUE(is_error(error, ErrorCode::kInvalidArgument, std::string("'") + value + "'"));
  }
}

}  // namespace
}  // namespace deep_ep
