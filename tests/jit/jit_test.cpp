#include "jit/jit.hpp"

#include <unistd.h>

#include <string>

#include "jit/jit_test_base.hpp"
#include "support/errors.hpp"
#include "support/forked_process.hpp"

namespace deep_ep::jit {
namespace {

namespace fs = std::filesystem;
using deep_ep::testing::compile_afresh;
using deep_ep::testing::error_from;
using deep_ep::testing::ForkedProcess;
using deep_ep::testing::is_error;
using deep_ep::testing::spec_of;
using deep_ep::testing::text_of;

class JitTest : public deep_ep::testing::JitTestBase {
 protected:
  /// Runs `body` in a child that file permissions bind, which they do not root.
  template <typename Body>
  static int run_unprivileged(Body body) {
    return ForkedProcess([&] {
             if (::geteuid() == 0) {
               ASSERT_EQ(::setresgid(65534, 65534, 65534), 0);
               ASSERT_EQ(::setresuid(65534, 65534, 65534), 0);
             }
             body();
           })
        .wait();
  }
};

TEST_F(JitTest, CompilesOnceAndRemembers) {
  use_fake_nvcc("echo report\n");
  KernelCache cache;
  const auto first = cache.compile(spec_of("a"));
  EXPECT_EQ(text_of(first), "a");
  EXPECT_EQ(first->log, "report\n");
  EXPECT_EQ(cache.compile(spec_of("a")), first);
  EXPECT_EQ(num_runs(), 1);
}

TEST_F(JitTest, FindsOnDiskWhatAnotherProcessCompiled) {
  use_fake_nvcc("echo report\n");
  const auto first = compile_afresh(spec_of("a"));
  fs::remove(cache() / "tmp");
  const auto second = compile_afresh(spec_of("a"));
  EXPECT_FALSE(fs::exists(cache() / "tmp"));  // a hit writes nothing and waits for no lock
  EXPECT_EQ(num_runs(), 1);
  EXPECT_EQ(text_of(second), "a");
  EXPECT_EQ(second->log, "report\n");
  EXPECT_EQ(second->folder, first->folder);
}

TEST_F(JitTest, KeepsSourceCubinLogAndCommand) {
  use_fake_nvcc("echo report\n");
  ::setenv("EP_JIT_DUMP_PTX", "1", 1);
  const fs::path entry = compile_afresh(spec_of("the \"source\""))->folder;
  EXPECT_EQ(entry.parent_path(), cache() / "cache");
  EXPECT_TRUE(entry.filename().string().starts_with("test."));
  EXPECT_EQ(entry.filename().string().size(), 5U + 32U);
  EXPECT_EQ(read_file(entry / "kernel.cu"), "the \"source\"");
  EXPECT_EQ(read_file(entry / "kernel.cubin"), "the \"source\"");
  EXPECT_EQ(read_file(entry / "kernel.ptx"), "the \"source\"");
  EXPECT_EQ(read_file(entry / "kernel.log"), "report\n");
  EXPECT_FALSE(fs::exists(entry / "kernel.sass"));
  const std::string meta = read_file(entry / "meta.json").value_or("");
  EXPECT_NE(meta.find("\"compiler\": \"fake nvcc 1.0\\n\""), std::string::npos) << meta;
  EXPECT_NE(meta.find("-arch=sm_90a -std=c++20"), std::string::npos) << meta;
  EXPECT_TRUE(fs::is_empty(cache() / "tmp"));
}

TEST_F(JitTest, CompilesAnewForEachDifference) {
  use_fake_nvcc();
  std::ptrdiff_t num_expected = 0;
  const auto expect_new = [&](const KernelSpec& spec, const char* what) {
    compile_afresh(spec);
    EXPECT_EQ(num_runs(), ++num_expected) << what;
    compile_afresh(spec);
    EXPECT_EQ(num_runs(), num_expected) << what;
  };
  KernelSpec spec = spec_of("a");
  expect_new(spec, "first");
  expect_new(spec_of("b"), "source");
  spec.arch = "sm_100a";
  expect_new(spec, "arch");
  spec.extra_flags = {"-DA=1"};
  expect_new(spec, "flags");
  spec.extra_flags = {"-DA=1", "-DB=1"};
  expect_new(spec, "more flags");
  for (const char* const name : {"EP_JIT_WITH_LINEINFO", "EP_JIT_PTXAS_VERBOSE"}) {
    ::setenv(name, "1", 1);
    ::testing::internal::CaptureStderr();
    expect_new(spec, name);
    ::testing::internal::GetCapturedStderr();
  }
  ::setenv("EP_JIT_CPP_STANDARD", "23", 1);
  ::setenv("EP_JIT_PTXAS_VERBOSE", "0", 1);
  expect_new(spec, "standard");
  use_fake_nvcc();  // forgets the runs; another version of the compiler:
  num_expected = 0;
  ::setenv("NVCC_PREPEND_FLAGS", "-O1", 1);
  expect_new(spec, "compiler");
  ::unsetenv("NVCC_PREPEND_FLAGS");
}

TEST_F(JitTest, DoesNotCompileAgainToDump) {
  use_fake_nvcc();
  compile_afresh(spec_of("a"));
  ::setenv("EP_JIT_DUMP_PTX", "1", 1);
  EXPECT_FALSE(fs::exists(compile_afresh(spec_of("a"))->folder / "kernel.ptx"));
  EXPECT_EQ(num_runs(), 1);
}

TEST_F(JitTest, RefusesBadTags) {
  use_fake_nvcc();
  for (const char* const tag : {"", "a b", "../a", "a.b", "\xc3\xa4"}) {
    KernelSpec spec = spec_of("a");
    spec.tag = tag;
    EXPECT_TRUE(is_error(error_from([&] { compile_afresh(spec); }), ErrorCode::kInvalidArgument,
                         std::string("'") + tag + "'"));
  }
}

TEST_F(JitTest, RefusesABadVariableBeforeItCompiles) {
  use_fake_nvcc();
  ::setenv("EP_JIT_CACHE_DIR", "/a::/b", 1);
  EXPECT_TRUE(is_error(error_from([&] { compile_afresh(spec_of("a")); }),
                       ErrorCode::kInvalidArgument, "EP_JIT_CACHE_DIR"));
  ::setenv("EP_JIT_DEBUG", "maybe", 1);
  EXPECT_TRUE(is_error(error_from([&] { compile_afresh(spec_of("a")); }),
                       ErrorCode::kInvalidArgument, "EP_JIT_DEBUG"));
  EXPECT_EQ(num_runs(), 0);
}

TEST_F(JitTest, NamesKernelAndMachineThatDoNotCompile) {
  use_fake_nvcc("exit 1\n");
  EXPECT_TRUE(is_error(error_from([&] { compile_afresh(spec_of("a")); }), ErrorCode::kDevice,
                       "kernel test for sm_90a: "));
  EXPECT_TRUE(fs::is_empty(cache() / "tmp"));
  EXPECT_FALSE(fs::exists(cache() / "cache"));
}

TEST_F(JitTest, RepairsADamagedEntry) {
  use_fake_nvcc();
  const auto first = compile_afresh(spec_of("a"));
  fs::remove(first->folder / "kernel.cubin");
  const auto second = compile_afresh(spec_of("a"));
  EXPECT_EQ(text_of(second), "a");
  EXPECT_EQ(num_runs(), 2);
  EXPECT_EQ(second->folder, first->folder);
  EXPECT_EQ(text_of(compile_afresh(spec_of("a"))), "a");
  EXPECT_EQ(num_runs(), 2);
}

TEST_F(JitTest, UsesRootsThatItCannotWrite) {
  use_fake_nvcc();
  const fs::path entry = compile_afresh(spec_of("a"))->folder;
  const int status = run_unprivileged([&] {
    EXPECT_EQ(compile_afresh(spec_of("a"))->folder, entry);
    EXPECT_EQ(num_runs(), 1);
    // a miss is compiled, and kept in memory alone
    const auto cubin = compile_afresh(spec_of("b"));
    EXPECT_EQ(text_of(cubin), "b");
    EXPECT_EQ(cubin->folder, "");
    // a second root that can be written serves as the first one
    ::setenv("EP_JIT_CACHE_DIR", ((folder() / "home").string() + ":" + cache().string()).c_str(),
             1);
    EXPECT_EQ(compile_afresh(spec_of("a"))->folder, entry);
    EXPECT_EQ(compile_afresh(spec_of("b"))->folder.parent_path(), folder() / "home" / "cache");
  });
  EXPECT_EQ(status, 0);
}

TEST_F(JitTest, WorksWithoutAHomeAndSaysSoOnlyWhenDebugging) {
  use_fake_nvcc();
  ::unsetenv("EP_JIT_CACHE_DIR");
  for (const char* const home : {"", "/proc/no/such/home"}) {
    ::setenv("HOME", home, 1);
    ::testing::internal::CaptureStderr();
    KernelCache cache;
    const auto cubin = cache.compile(spec_of("a"));
    EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
    EXPECT_EQ(text_of(cubin), "a");
    EXPECT_EQ(cubin->folder, "");
    EXPECT_EQ(cache.compile(spec_of("a")), cubin);
  }
  EXPECT_EQ(num_runs(), 2);
  // in a child, since a process says it once
  EXPECT_EQ(run_unprivileged([] {
              ::setenv("EP_JIT_DEBUG", "1", 1);
              ::testing::internal::CaptureStderr();
              compile_afresh(spec_of("b"));
              compile_afresh(spec_of("c"));
              const std::string told = ::testing::internal::GetCapturedStderr();
              const std::size_t first = told.find("compiled kernels are not kept: ");
              EXPECT_NE(first, std::string::npos) << told;
              EXPECT_EQ(told.find("compiled kernels are not kept: ", first + 1), std::string::npos);
            }),
            0);
}

}  // namespace
}  // namespace deep_ep::jit
