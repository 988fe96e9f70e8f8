#include "base/config.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

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
    for (const config::Variable& variable : config::kVariables) {
      ::unsetenv(variable.name);
      ::unsetenv(("DJ_" + std::string(variable.name).substr(3)).c_str());
    }
  }
  void TearDown() override { SetUp(); }
};

TEST_F(ConfigTest, HasTheDocumentedDefaults) {
  EXPECT_EQ(config::host_id(), std::nullopt);
  EXPECT_EQ(config::timeout_or(seconds(7)), seconds(7));
  EXPECT_EQ(config::buffer_debug(), 0);
  EXPECT_EQ(config::cpu_threads(), 0);
  EXPECT_EQ(config::test_delay_us(), 0);
  EXPECT_EQ(config::nvrtc_library(), std::nullopt);
  const config::JitSettings jit = config::jit_settings();
  EXPECT_EQ(jit.nvcc_compiler, std::nullopt);
  EXPECT_EQ(jit.cpp_standard, 20);
  EXPECT_FALSE(jit.debug || jit.print_command || jit.ptxas_verbose || jit.check_no_spills ||
               jit.check_no_local_memory || jit.with_lineinfo || jit.dump_ptx || jit.dump_sass);
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

TEST_F(ConfigTest, ReadsSwitchesAsWordsOfAnyCaseOrIntegers) {
  for (const char* value : {"true", "TRUE", "yes", "Yes", "1", "2", "-1"}) {
    ::setenv("EP_JIT_WITH_LINEINFO", value, 1);
    EXPECT_TRUE(config::jit_settings().with_lineinfo) << value;
  }
  for (const char* value : {"false", "No", "0", "00", ""}) {
    ::setenv("EP_JIT_WITH_LINEINFO", value, 1);
    EXPECT_FALSE(config::jit_settings().with_lineinfo) << value;
  }
}

TEST_F(ConfigTest, RefusesBadJitSettingsByNameAndValue) {
  struct Case {
    const char* name;
    const char* value;
  };
  for (const auto& [name, value] : {Case{"EP_JIT_DEBUG", "on"},
                                    {"DJ_JIT_DEBUG", "1x"},
                                    {"EP_JIT_PRINT_COMPILER_COMMAND", "1.0"},
                                    {"EP_JIT_PTXAS_VERBOSE", " 1"},
                                    {"EP_JIT_CHECK_NO_SPILLS", "t"},
                                    {"EP_JIT_CHECK_NO_LOCAL_MEMORY", "y"},
                                    {"EP_JIT_WITH_LINEINFO", "truee"},
                                    {"EP_JIT_DUMP_PTX", "-"},
                                    {"EP_JIT_DUMP_SASS", "99999999999999999999"},
                                    {"EP_JIT_DUMP_ASM", "off"},
                                    {"EP_JIT_CPP_STANDARD", "17"},
                                    {"DJ_JIT_CPP_STANDARD", "c++20"}}) {
    ::setenv(name, value, 1);
    const Error error = error_from([] { config::jit_settings(); });
    EXPECT_TRUE(is_error(error, ErrorCode::kInvalidArgument, name));
    EXPECT_TRUE(is_error(error, ErrorCode::kInvalidArgument, std::string("'") + value + "'"));
    ::unsetenv(name);
  }
}

TEST_F(ConfigTest, PrefersTheOwnPrefixOfJitSettings) {
  ::setenv("DJ_JIT_CPP_STANDARD", "23", 1);
  ::setenv("DJ_JIT_NVCC_COMPILER", "/other/nvcc", 1);
  EXPECT_EQ(config::jit_settings().cpp_standard, 23);
  EXPECT_EQ(config::jit_settings().nvcc_compiler, "/other/nvcc");
  ::setenv("EP_JIT_CPP_STANDARD", "26", 1);
  ::setenv("EP_JIT_NVCC_COMPILER", "/own/nvcc", 1);
  EXPECT_EQ(config::jit_settings().cpp_standard, 26);
  EXPECT_EQ(config::jit_settings().nvcc_compiler, "/own/nvcc");
  ::setenv("JIT_DEBUG", "1", 1);
  EXPECT_FALSE(config::jit_settings().debug);
  ::unsetenv("JIT_DEBUG");
}

TEST_F(ConfigTest, LetsJitDebugImplyAllButTheChecks) {
  ::setenv("EP_JIT_DEBUG", "1", 1);
  ::setenv("EP_JIT_DUMP_PTX", "0", 1);
  const config::JitSettings jit = config::jit_settings();
  EXPECT_TRUE(jit.debug && jit.print_command && jit.ptxas_verbose && jit.with_lineinfo &&
              jit.dump_ptx);
  EXPECT_FALSE(jit.check_no_spills || jit.check_no_local_memory || jit.dump_sass);
}

TEST_F(ConfigTest, TakesDumpAsmAsPtxAndSass) {
  ::setenv("EP_JIT_DUMP_ASM", "1", 1);
  EXPECT_TRUE(config::jit_settings().dump_ptx);
  EXPECT_TRUE(config::jit_settings().dump_sass);
}

TEST_F(ConfigTest, ReadsTheFoldersOfCompiledKernels) {
  using Folders = std::vector<std::string>;
  const std::optional<std::string> home = config::read_environment("HOME");
  ::setenv("HOME", "/home/me", 1);
  EXPECT_EQ(config::jit_cache_dirs(), Folders{"/home/me/.dj"});
  ::setenv("DJ_JIT_CACHE_DIR", "/a b:/c", 1);
  EXPECT_EQ(config::jit_cache_dirs(), (Folders{"/a b", "/c"}));
  ::setenv("EP_JIT_CACHE_DIR", "/d", 1);
  EXPECT_EQ(config::jit_cache_dirs(), Folders{"/d"});
  for (const char* value : {"", ":", "/a:", ":/a", "/a::/b"}) {
    ::setenv("EP_JIT_CACHE_DIR", value, 1);
    const Error error = error_from([] { config::jit_cache_dirs(); });
    EXPECT_TRUE(is_error(error, ErrorCode::kInvalidArgument, "EP_JIT_CACHE_DIR"));
    EXPECT_TRUE(is_error(error, ErrorCode::kInvalidArgument, std::string("'") + value + "'"));
  }
  ::unsetenv("EP_JIT_CACHE_DIR");
  ::unsetenv("DJ_JIT_CACHE_DIR");
  ::unsetenv("HOME");
  EXPECT_EQ(config::jit_cache_dirs(), Folders{});
  if (home) ::setenv("HOME", home->c_str(), 1);
}

}  // namespace
}  // namespace deep_ep
