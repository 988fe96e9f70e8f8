#include "jit/nvrtc.hpp"

#include <dlfcn.h>

#include <string>

#include "deep_ep/jit.hpp"
#include "jit/jit_test_base.hpp"
#include "support/errors.hpp"
#include "support/forked_process.hpp"

namespace deep_ep::jit {
namespace {

using deep_ep::testing::error_from;
using deep_ep::testing::ForkedProcess;
using deep_ep::testing::is_error;
using deep_ep::testing::why_no_nvrtc;

class NvrtcTest : public deep_ep::testing::JitTestBase {};

TEST_F(NvrtcTest, HasAVersion) {
  if (const std::string why = why_no_nvrtc(); !why.empty()) GTEST_SKIP() << why;
  EXPECT_TRUE(nvrtc_version().starts_with("nvrtc 1")) << nvrtc_version();
  EXPECT_EQ(nvrtc_version().find(" 0 bytes"), std::string::npos) << nvrtc_version();
}

TEST_F(NvrtcTest, TakesALibraryByItsPath) {
  const auto folders = deep_ep::testing::nvrtc_test_folders();
  if (folders.empty()) GTEST_SKIP() << "no NVRTC in .venv when this was built";
  const std::string link = (folder() / "library of my own.so").string();
  std::filesystem::create_symlink(folders[0] + "/libnvrtc.so.13", link);
  // in a child, since the library stays loaded
  ForkedProcess child([&] {
    ::setenv("EP_NVRTC_LIBRARY", link.c_str(), 1);
    EXPECT_TRUE(nvrtc_version().starts_with("nvrtc 13.")) << nvrtc_version();
    // it needs a second library, which lies where the link leads
    const NvrtcOutput output =
        nvrtc_compile({.source = "", .headers = {}, .options = {"-arch=sm_90a"}});
    EXPECT_FALSE(output.cubin.empty());
  });
  EXPECT_EQ(child.wait(), 0);
}

TEST_F(NvrtcTest, TriesNoOtherThanTheOneThatIsNamed) {
  why_no_nvrtc();  // what was found before does not matter either
  ::setenv("EP_NVRTC_LIBRARY", "/no/such/libnvrtc.so", 1);
  const Error absent = error_from([] { nvrtc_version(); });
  EXPECT_TRUE(is_error(absent, ErrorCode::kUnsupported, "EP_NVRTC_LIBRARY"));
  EXPECT_TRUE(is_error(absent, ErrorCode::kUnsupported, "'/no/such/libnvrtc.so'"));

  ::setenv("EP_NVRTC_LIBRARY", "libm.so.6", 1);
  const Error other = error_from([] { nvrtc_version(); });
  EXPECT_TRUE(is_error(other, ErrorCode::kUnsupported, "it has no nvrtc"));
}

TEST_F(NvrtcTest, SaysWhereItWasLookedForAndWhatToInstall) {
  set_nvrtc_folders({"/no/such/wheel"});
  ::setenv("CUDA_HOME", "/no/such/toolkit", 1);
  try {
    nvrtc_version();
    ::unsetenv("CUDA_HOME");
    GTEST_SKIP() << "NVRTC is in the system, or an earlier test of this process has found it";
  } catch (const Error& error) {
    ::unsetenv("CUDA_HOME");
    EXPECT_TRUE(is_error(error, ErrorCode::kUnsupported, "/no/such/toolkit/lib64"));
    EXPECT_TRUE(is_error(error, ErrorCode::kUnsupported, "/usr/local/cuda/lib64, /no/such/wheel"));
    EXPECT_TRUE(is_error(error, ErrorCode::kUnsupported, "pip install nvidia-cuda-nvrtc"));
    EXPECT_TRUE(is_error(error, ErrorCode::kUnsupported, "EP_NVRTC_LIBRARY"));
  }
  // the failure is not kept
  EXPECT_TRUE(deep_ep::testing::nvrtc_test_folders().empty() || why_no_nvrtc().empty());
}

TEST_F(NvrtcTest, UsesNamedHeadersAndOptions) {
  if (const std::string why = why_no_nvrtc(); !why.empty()) GTEST_SKIP() << why;
  const std::vector<EmbeddedFile> headers{
      {"my/number.hpp", "#pragma once\n#define NUMBER kNumber\n"}};
  const std::string source =
      "#include <my/number.hpp>\n#include \"my/number.hpp\"\n"
      "extern \"C\" __global__ void k(int* x) { *x = NUMBER; }\n";
  const NvrtcOutput output = nvrtc_compile(
      {.source = source, .headers = headers, .options = {"-arch=sm_90a", "-DkNumber=4711"}});
  EXPECT_TRUE(
      output.cubin.starts_with("\x7f"
                               "ELF"));
  EXPECT_NE(output.ptx.find("4711"), std::string::npos) << output.ptx;
  EXPECT_EQ(output.ptx.find('\0'), std::string::npos);
  EXPECT_EQ(output.log, "");
}

}  // namespace
}  // namespace deep_ep::jit
