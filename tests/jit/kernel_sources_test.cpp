#include "jit/kernel_sources.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>

namespace deep_ep::jit {
namespace {

TEST(KernelSourcesTest, HoldTheWholeTree) {
  std::string_view previous;
  for (const EmbeddedFile& file : kernel_headers()) {
    EXPECT_TRUE(std::string_view(file.name).starts_with("deep_ep/")) << file.name;
    EXPECT_TRUE(std::string_view(file.text).starts_with("#pragma once\n")) << file.name;
    EXPECT_TRUE(std::string_view(file.text).ends_with("\n")) << file.name;
    EXPECT_LT(previous, file.name);
    previous = file.name;
  }
  const auto has = [](std::string_view part) {
    return std::ranges::any_of(kernel_headers(), [part](const EmbeddedFile& file) {
      return std::string_view(file.name).find(part) != std::string_view::npos;
    });
  };
  EXPECT_TRUE(has("deep_ep/abi/"));
  EXPECT_TRUE(has("deep_ep/device/"));
}

TEST(KernelSourcesTest, NameTheFilesThatHoldKernels) {
  ASSERT_FALSE(kernel_names().empty());
  for (const std::string& name : kernel_names()) {
    EXPECT_TRUE(name.ends_with(".cuh")) << name;
    EXPECT_EQ(std::ranges::count(name, '/'), 1) << name;
  }
}

TEST(KernelSourcesTest, KeepTheShimsOfNvrtcApart) {
  ASSERT_EQ(nvrtc_shims().size(), 1U);
  EXPECT_STREQ(nvrtc_shims()[0].name, "cstdint");
}

TEST(KernelSourcesTest, KnowTheVersionOfTheLibrary) {
  EXPECT_EQ(std::ranges::count(library_version(), '.'), 2) << library_version();
}

}  // namespace
}  // namespace deep_ep::jit
