#include "jit/compiler.hpp"

#include <string>
#include <vector>

#include "jit/jit_test_base.hpp"
#include "support/errors.hpp"

namespace deep_ep::jit {
namespace {

using config::JitSettings;
using deep_ep::testing::error_from;
using deep_ep::testing::is_error;
using deep_ep::testing::why_no_nvrtc;

constexpr const char* kTiny = R"(
#include <cstdint>
constexpr std::int64_t twice(std::int64_t value) { return 2 * value; }
extern "C" __global__ void tiny(std::int64_t* x) { x[threadIdx.x] = twice(x[threadIdx.x]); }
)";

constexpr const char* kWithArray = R"(
extern "C" __global__ void with_array(int* x) {
  int values[100];
  for (int i = 0; i < 100; ++i) values[i] = x[i];
  for (int i = 0; i < 100; ++i) x[i] = values[x[i] % 100];
}
)";

constexpr const char* kWithSpills = R"(
extern "C" __global__ void with_spills(int* x) {
  int values[100];
#pragma unroll
  for (int i = 0; i < 100; ++i) values[i] = x[i * 100];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 100; ++i) x[i * 100] = values[99 - i] * values[(i * 7) % 100];
}
)";

bool contains(const std::vector<std::string>& flags, const std::string& flag) {
  return std::find(flags.begin(), flags.end(), flag) != flags.end();
}

class CompilerTest : public deep_ep::testing::JitTestBase {
 protected:
  CompileOutput compile(const std::string& source, const JitSettings& settings = {},
                        const std::vector<std::string>& extra_flags = {}) {
    return compile_cubin(plan_compile(settings, "sm_90a", extra_flags), source);
  }
};

class NvrtcCompilerTest : public CompilerTest {
 protected:
  void SetUp() override {
    CompilerTest::SetUp();
    if (const std::string why = why_no_nvrtc(); !why.empty()) GTEST_SKIP() << why;
  }
};

TEST_F(NvrtcCompilerTest, CompilesForEachMachine) {
  for (const char* const arch : {"sm_80", "sm_90a", "sm_100a"}) {
    const CompileOutput output = compile_cubin(plan_compile({}, arch, {}), kTiny);
    EXPECT_TRUE(
        output.cubin.starts_with("\x7f"
                                 "ELF"))
        << arch;
    EXPECT_NE(output.cubin.find("tiny"), std::string::npos) << arch;
    EXPECT_EQ(output.ptx + output.sass, "") << arch;
  }
}

TEST_F(NvrtcCompilerTest, FindsTheKernelTree) {
  const std::string name = kernel_headers().front().name;
  EXPECT_NO_THROW(compile("#include \"" + name + "\"\n#include <" + name + ">\n"));
}

TEST_F(NvrtcCompilerTest, TakesNoFileOfTheWorkingDirectory) {
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder());
  write_new_file("stray.hpp", "\n");
  EXPECT_TRUE(is_error(error_from([&] { compile("#include \"stray.hpp\"\n"); }), ErrorCode::kDevice,
                       "stray.hpp"));
  std::filesystem::current_path(before);
}

TEST_F(NvrtcCompilerTest, RepeatsWhatTheCompilerSaysAboutABrokenKernel) {
  const Error error = error_from([&] { compile("__global__ void f() { undeclared = 1; }"); });
  EXPECT_TRUE(is_error(error, ErrorCode::kDevice, "identifier \"undeclared\" is undefined"));
  EXPECT_TRUE(is_error(error, ErrorCode::kDevice, "nvrtc 1"));
}

TEST_F(NvrtcCompilerTest, NamesAFlagThatTheCompilerDoesNotKnow) {
  const Error error = error_from([&] { compile(kTiny, {}, {"--no-such-flag"}); });
  EXPECT_TRUE(is_error(error, ErrorCode::kUnsupported, "no-such-flag"));
  EXPECT_TRUE(is_error(error_from([&] { compile_cubin(plan_compile({}, "sm_7", {}), kTiny); }),
                       ErrorCode::kUnsupported, "arch"));
}

TEST_F(NvrtcCompilerTest, RefusesLocalMemoryWhereItIsChecked) {
  const JitSettings settings{.check_no_local_memory = true};
  EXPECT_NO_THROW(compile(kTiny, settings));
  EXPECT_NO_THROW(compile(kWithArray, {.check_no_spills = true}));
  EXPECT_NO_THROW(compile(kWithArray));
  const Error error = error_from([&] { compile(kWithArray, settings); });
  EXPECT_TRUE(is_error(error, ErrorCode::kDevice, "with_array has 400 bytes of stack"));
}

TEST_F(NvrtcCompilerTest, RefusesSpillsWhereTheyAreChecked) {
  const std::vector<std::string> few_registers{"-maxrregcount=24"};
  EXPECT_NO_THROW(compile(kTiny, {.check_no_spills = true}, few_registers));
  EXPECT_NO_THROW(compile(kWithSpills, {}, few_registers));
  const Error error =
      error_from([&] { compile(kWithSpills, {.check_no_spills = true}, few_registers); });
  EXPECT_TRUE(is_error(error, ErrorCode::kDevice, "with_spills has "));
  EXPECT_TRUE(is_error(error, ErrorCode::kDevice, " bytes of spill stores"));
}

TEST_F(NvrtcCompilerTest, KeepsPtxAndSourceLinesWhereAsked) {
  const CompileOutput output = compile(kTiny, {.with_lineinfo = true, .dump_ptx = true});
  EXPECT_NE(output.ptx.find(".target sm_90a"), std::string::npos) << output.ptx;
  EXPECT_NE(output.ptx.find(".loc"), std::string::npos) << output.ptx;
  EXPECT_EQ(compile(kTiny, {.dump_ptx = true}).ptx.find(".loc"), std::string::npos);
}

TEST_F(NvrtcCompilerTest, PrintsTheCommandAndTheReportOfPtxas) {
  ::testing::internal::CaptureStderr();
  compile(kTiny, {.print_command = true, .ptxas_verbose = true});
  const std::string printed = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(printed.find("deep_ep: nvrtc -arch=sm_90a -std=c++20 "), std::string::npos) << printed;
  EXPECT_NE(printed.find("Function properties for tiny"), std::string::npos) << printed;
  ::testing::internal::CaptureStderr();
  compile(kTiny);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST_F(CompilerTest, RefusesOtherFormsOfArch) {
  use_fake_nvcc();
  for (const char* const arch :
       {"", "90a", "sm_", "sm_a", "compute_90", "sm_90ab", "sm_90a ", "SM_90"}) {
    const Error error = error_from([&] { plan_compile(config::jit_settings(), arch, {}); });
    EXPECT_TRUE(is_error(error, ErrorCode::kInvalidArgument, std::string("'") + arch + "'"));
  }
}

TEST_F(CompilerTest, MakesEachCheckAFlag) {
  use_fake_nvcc();
  JitSettings settings = config::jit_settings();
  settings.cpp_standard = 23;
  const auto plain = plan_compile(settings, "sm_80", {"-DX=1"}).flags;
  EXPECT_TRUE(contains(plain, "-arch=sm_80"));
  EXPECT_TRUE(contains(plain, "-std=c++23"));
  EXPECT_TRUE(contains(plain, "-DX=1"));
  EXPECT_FALSE(contains(plain, "--ptxas-options=-v"));
  for (bool JitSettings::*const check :
       {&JitSettings::check_no_spills, &JitSettings::check_no_local_memory}) {
    JitSettings checked = settings;
    checked.*check = true;
    JitSettings verbose = settings;
    verbose.ptxas_verbose = true;
    const auto flags = plan_compile(checked, "sm_80", {}).flags;
    EXPECT_TRUE(contains(flags, "--ptxas-options=-v"));
    EXPECT_NE(flags, plan_compile(verbose, "sm_80", {}).flags);
  }
}

TEST_F(CompilerTest, RunsANvccWhosePathHasBlanksAndQuotes) {
  use_fake_nvcc();
  EXPECT_EQ(compile(kTiny, config::jit_settings(), {"-DTEXT=a b"}).cubin, kTiny);
  EXPECT_EQ(num_runs(), 1);
  EXPECT_NE(read_file(runs_file())->find("-DTEXT=a b -I "), std::string::npos);
}

TEST_F(CompilerTest, GivesNvccTheKernelTreeButNoShims) {
  use_fake_nvcc(
      "folder_of() { while [ \"$1\" != -I ]; do shift; done; echo \"$2\"; }\n"
      "cd \"$(folder_of \"$@\")\" && find . -type f\n");
  const std::string files = compile(kTiny, config::jit_settings()).log;
  for (const EmbeddedFile& header : kernel_headers()) {
    EXPECT_NE(files.find(std::string("./") + header.name + "\n"), std::string::npos) << header.name;
  }
  EXPECT_EQ(files.find("cstdint"), std::string::npos) << files;
}

TEST_F(CompilerTest, RepeatsWhatNvccPrintsWhenItFails) {
  use_fake_nvcc("echo 'kernel.cu: no good' >&2; exit 2\n");
  const Error error = error_from([&] { compile(kTiny, config::jit_settings()); });
  EXPECT_TRUE(is_error(error, ErrorCode::kDevice, "kernel.cu: no good"));
  EXPECT_TRUE(is_error(error, ErrorCode::kDevice, "exit status 2"));
}

TEST_F(CompilerTest, TakesAnNvccThatFailsAsFailedWhateverItLeaves) {
  use_fake_nvcc("trap 'exit 2' EXIT\n");
  EXPECT_TRUE(is_error(error_from([&] { compile(kTiny, config::jit_settings()); }),
                       ErrorCode::kDevice, "exit status 2"));
}

TEST_F(CompilerTest, TakesAnNvccWithoutAResultAsFailed) {
  use_fake_nvcc("exit 0\n");
  EXPECT_TRUE(is_error(error_from([&] { compile(kTiny, config::jit_settings()); }),
                       ErrorCode::kDevice, "exit status 0"));
}

TEST_F(CompilerTest, NamesAnNvccThatIsNotThere) {
  ::setenv("EP_JIT_NVCC_COMPILER", "/no/such/nvcc", 1);
  EXPECT_TRUE(is_error(error_from([&] { compile(kTiny, config::jit_settings()); }),
                       ErrorCode::kUnsupported, "cannot run /no/such/nvcc"));
}

TEST_F(CompilerTest, RefusesACheckThatTheCompilerDoesNotReportOn) {
  use_fake_nvcc("echo 'nothing about memory'\n");
  JitSettings settings = config::jit_settings();
  settings.check_no_spills = true;
  EXPECT_TRUE(is_error(error_from([&] { compile(kTiny, settings); }), ErrorCode::kDevice,
                       "nothing about memory"));
}

TEST_F(CompilerTest, TakesTheEnvironmentOfNvccAsPartOfIt) {
  use_fake_nvcc();
  const auto compiler = [] { return plan_compile(config::jit_settings(), "sm_80", {}).compiler; };
  const std::string before = compiler();
  EXPECT_NE(before.find("fake nvcc 1.0"), std::string::npos);
  ::setenv("NVCC_APPEND_FLAGS", "-DY=1", 1);
  EXPECT_NE(compiler(), before);
  ::unsetenv("NVCC_APPEND_FLAGS");
  EXPECT_EQ(compiler(), before);
}

TEST_F(CompilerTest, DisassemblesWithTheCuobjdumpBesideNvcc) {
  use_fake_nvcc();
  const auto cuobjdump = folder() / "a 'toolkit'" / "cuobjdump";
  std::ofstream(cuobjdump) << "#!/bin/sh\necho \"$1\"; cat \"$2\"\n";
  ASSERT_EQ(::chmod(cuobjdump.c_str(), 0755), 0);
  JitSettings settings = config::jit_settings();
  EXPECT_EQ(compile(kTiny, settings).sass, "");
  settings.dump_sass = true;
  EXPECT_EQ(compile(kTiny, settings).sass, std::string("--dump-sass\n") + kTiny);
  settings.dump_ptx = true;
  EXPECT_EQ(compile(kTiny, settings).ptx, kTiny);  // by a second run
  EXPECT_EQ(num_runs(), 4);
}

TEST_F(CompilerTest, NeedsCuobjdumpOnlyIfADisassemblyIsAskedForByName) {
  if (std::system("command -v cuobjdump /usr/local/cuda/bin/cuobjdump >/dev/null") == 0) {
    GTEST_SKIP() << "cuobjdump is installed";
  }
  use_fake_nvcc();
  JitSettings settings = config::jit_settings();
  settings.debug = true;
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(compile(kTiny, settings).cubin, kTiny);
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("no disassembly"), std::string::npos);
  settings.dump_sass = true;
  EXPECT_TRUE(is_error(error_from([&] { compile(kTiny, settings); }), ErrorCode::kUnsupported,
                       "cuobjdump"));
}

TEST_F(CompilerTest, CompilesWithARealNvcc) {
  if (std::system("nvcc --version >/dev/null 2>&1") != 0) GTEST_SKIP() << "nvcc is not installed";
  const JitSettings settings{
      .nvcc_compiler = "nvcc", .check_no_local_memory = true, .dump_ptx = true};
  const CompileOutput output = compile(kTiny, settings);
  EXPECT_TRUE(
      output.cubin.starts_with("\x7f"
                               "ELF"));
  EXPECT_NE(output.ptx.find(".target sm_90a"), std::string::npos) << output.ptx;
  EXPECT_TRUE(is_error(error_from([&] { compile(kWithArray, settings); }), ErrorCode::kDevice,
                       "with_array has 400 bytes of stack"));
}

}  // namespace
}  // namespace deep_ep::jit
