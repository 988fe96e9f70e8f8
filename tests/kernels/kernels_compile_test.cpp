// Every kernel compiles for every machine with the flags of the library, and keeps to registers.
// Needs no GPU.
#include <algorithm>
#include <string>
#include <string_view>
#include <tuple>

#include "jit/compiler.hpp"
#include "jit/jit_test_base.hpp"
#include "jit/kernel_sources.hpp"

namespace deep_ep::jit {
namespace {

using Parameters = std::tuple<std::string, std::string>;  ///< file and architecture

class KernelsCompileTest : public deep_ep::testing::JitTestBase,
                           public ::testing::WithParamInterface<Parameters> {};

/// Whether the file says why it uses local memory.
bool may_use_local_memory(const std::string& name) {
  return std::ranges::any_of(kernel_headers(), [&](const EmbeddedFile& file) {
    return file.name == name &&
           std::string_view(file.text).find("// local memory: ") != std::string_view::npos;
  });
}

TEST_P(KernelsCompileTest, WithoutSpillsAndLocalMemory) {
  if (const std::string why = deep_ep::testing::why_no_nvrtc(); !why.empty()) GTEST_SKIP() << why;
  const auto& [name, arch] = GetParam();
  config::JitSettings settings = config::jit_settings();
  settings.check_no_spills = settings.check_no_local_memory = !may_use_local_memory(name);
  try {
    const CompilePlan plan = plan_compile(settings, arch, {});
    const CompileOutput output = compile_cubin(plan, "#include \"" + name + "\"\n");
    EXPECT_FALSE(output.cubin.empty());
  } catch (const Error& error) {
    FAIL() << error.what();
  }
}

/// "deep_ep/ep_move.cuh" for sm_90a is ep_move_sm_90a.
std::string id_of(const ::testing::TestParamInfo<Parameters>& info) {
  const auto& [name, arch] = info.param;
  const std::size_t begin = name.rfind('/') + 1;
  return name.substr(begin, name.rfind('.') - begin) + "_" + arch;
}

INSTANTIATE_TEST_SUITE_P(All, KernelsCompileTest,
                         ::testing::Combine(::testing::ValuesIn(kernel_names()),
                                            ::testing::Values(std::string("sm_80"),
                                                              std::string("sm_90a"),
                                                              std::string("sm_100a"))),
                         id_of);

}  // namespace
}  // namespace deep_ep::jit
