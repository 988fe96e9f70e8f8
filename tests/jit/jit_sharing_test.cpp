// Threads and processes that want the same kernel at the same time compile it once.
#include <barrier>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "jit/jit.hpp"
#include "jit/jit_test_base.hpp"
#include "support/errors.hpp"
#include "support/forked_process.hpp"
#include "support/threads.hpp"

namespace deep_ep::jit {
namespace {

namespace fs = std::filesystem;
using deep_ep::testing::compile_afresh;
using deep_ep::testing::error_from;
using deep_ep::testing::ForkedProcess;
using deep_ep::testing::is_error;
using deep_ep::testing::run_threads;
using deep_ep::testing::spec_of;
using deep_ep::testing::text_of;

class JitSharingTest : public deep_ep::testing::JitTestBase {
 protected:
  void wait_for_runs(std::ptrdiff_t num) const {
    while (num_runs() < num) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
};

TEST_F(JitSharingTest, LetsThreadsShareOneCompilation) {
  use_fake_nvcc("sleep 0.2\n");
  KernelCache cache;
  std::vector<std::shared_ptr<const Cubin>> cubins(8);
  std::barrier start(8);
  run_threads(8, [&](int i) {
    start.arrive_and_wait();
    cubins[static_cast<std::size_t>(i)] = cache.compile(spec_of("a"));
  });
  for (const auto& cubin : cubins) EXPECT_EQ(cubin, cubins[0]);
  EXPECT_EQ(num_runs(), 1);
}

TEST_F(JitSharingTest, DoesNotHoldUpThreadsThatWantAnotherKernel) {
  use_fake_nvcc(
      "case \"$(cat \"$(for last; do :; done; echo \"$last\")\")\" in\n"
      "slow) while [ ! -e \"$folder/go\" ]; do sleep 0.02; done;; esac\n");
  KernelCache cache;
  const auto compile_slow = [&] { EXPECT_EQ(text_of(cache.compile(spec_of("slow"))), "slow"); };
  std::jthread slow(compile_slow);
  wait_for_runs(1);
  std::jthread waiting(compile_slow);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // so that it most likely waits
  EXPECT_EQ(text_of(cache.compile(spec_of("fast"))), "fast");
  write_new_file(runs_file().parent_path() / "go", "");
}

TEST_F(JitSharingTest, GivesAFailureToAllWhoWaitAndForgetsIt) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer cannot see how libstdc++ counts who holds an exception";
#endif
  use_fake_nvcc("sleep 0.2; [ -e \"$folder/go\" ] || { echo not yet; exit 1; }\n");
  KernelCache cache;
  std::barrier start(8);
  run_threads(8, [&](int) {
    start.arrive_and_wait();
    EXPECT_TRUE(
        is_error(error_from([&] { cache.compile(spec_of("a")); }), ErrorCode::kDevice, "not yet"));
  });
  write_new_file(runs_file().parent_path() / "go", "");
  EXPECT_EQ(text_of(cache.compile(spec_of("a"))), "a");
}

TEST_F(JitSharingTest, LetsProcessesShareOneCompilation) {
  use_fake_nvcc("sleep 0.2\n");
  std::vector<ForkedProcess> processes;
  for (int i = 0; i < 4; ++i) {
    processes.emplace_back([] { EXPECT_EQ(text_of(compile_afresh(spec_of("a"))), "a"); });
  }
  for (ForkedProcess& process : processes) EXPECT_EQ(process.wait(), 0);
  EXPECT_EQ(num_runs(), 1);
  EXPECT_TRUE(fs::is_empty(cache() / "tmp"));
}

TEST_F(JitSharingTest, SurvivesAProcessThatIsKilledWhileItCompiles) {
  // the first run hangs, until the test's folder is removed
  use_fake_nvcc("while [ $run = 1 ] && [ -e \"$0\" ]; do sleep 0.02; done\n");
  const auto compile = [] { EXPECT_EQ(text_of(compile_afresh(spec_of("a"))), "a"); };
  ForkedProcess victim(compile);
  wait_for_runs(1);
  std::vector<ForkedProcess> processes;
  for (int i = 0; i < 3; ++i) processes.emplace_back(compile);
  victim.kill();
  EXPECT_LT(victim.wait(), 0);
  for (ForkedProcess& process : processes) EXPECT_EQ(process.wait(), 0);
  EXPECT_EQ(num_runs(), 2);  // not 4, as it would be had they waited in vain
  for (const auto& item : fs::directory_iterator(folder() / "tmp")) fs::remove_all(item);
}

TEST_F(JitSharingTest, CompilesWithNvrtcAndSharesItsResult) {
  if (const std::string why = deep_ep::testing::why_no_nvrtc(); !why.empty()) GTEST_SKIP() << why;
  const KernelSpec spec = spec_of("extern \"C\" __global__ void k(int* x) { *x = 1; }");
  const auto cubin = compile(spec);
  EXPECT_TRUE(
      text_of(cubin).starts_with("\x7f"
                                 "ELF"));
  EXPECT_EQ(compile(spec), cubin);
  std::vector<ForkedProcess> processes;
  for (int i = 0; i < 4; ++i) {
    processes.emplace_back([&] { EXPECT_EQ(text_of(compile_afresh(spec)), text_of(cubin)); });
  }
  for (ForkedProcess& process : processes) EXPECT_EQ(process.wait(), 0);
}

}  // namespace
}  // namespace deep_ep::jit
