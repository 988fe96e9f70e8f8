#pragma once
// What the tests of the JIT share: an environment of their own, NVRTC where it is installed, and a
// compiler that counts how often it runs.
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "base/config.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/jit.hpp"
#include "jit/jit.hpp"
#include "jit/nvrtc.hpp"
#include "os/file.hpp"

namespace deep_ep::testing {

/// DEEP_EP_TEST_NVRTC_FOLDERS, which cmake/tests.cmake sets, as the library wants it.
inline std::vector<std::string> nvrtc_test_folders() {
  std::vector<std::string> folders;
  std::istringstream all(DEEP_EP_TEST_NVRTC_FOLDERS);
  for (std::string folder; std::getline(all, folder, ':');) {
    if (!folder.empty()) folders.push_back(folder);
  }
  return folders;
}

/// Why NVRTC cannot be used here; empty if it can.
inline std::string why_no_nvrtc() {
  set_nvrtc_folders(nvrtc_test_folders());
  try {
    jit::nvrtc_version();
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

/// A spec that differs from others in its source alone.
inline jit::KernelSpec spec_of(const std::string& source) {
  return {.tag = "test", .source = source, .arch = "sm_90a", .extra_flags = {}};
}

inline std::string text_of(const std::shared_ptr<const jit::Cubin>& cubin) {
  const auto* const bytes = reinterpret_cast<const char*>(cubin->image.data());
  return {bytes, cubin->image.size()};
}

/// Compiles as a new process would: in memory nothing is known yet.
inline std::shared_ptr<const jit::Cubin> compile_afresh(const jit::KernelSpec& spec) {
  return jit::KernelCache().compile(spec);
}

/// Unsets every variable of the JIT, and gives it a home, a cache and a folder for temporary files
/// below folder().
class JitTestBase : public ::testing::Test {
 protected:
  void SetUp() override {
    unset_all();
    for (const char* const name : {"home", "tmp"}) {
      make_folders(folder() / name);
      ASSERT_EQ(::chmod((folder() / name).c_str(), 0777), 0);
    }
    ::setenv("HOME", (folder() / "home").c_str(), 1);
    ::setenv("TMPDIR", (folder() / "tmp").c_str(), 1);
    ::setenv("EP_JIT_CACHE_DIR", cache().c_str(), 1);
  }
  void TearDown() override {
    EXPECT_TRUE(std::filesystem::is_empty(folder() / "tmp")) << "temporary files are left";
    unset_all();
    restore("HOME", home_);
    restore("TMPDIR", tmpdir_);
  }

  const std::filesystem::path& folder() const { return folder_.path(); }
  std::filesystem::path cache() const { return folder() / "cache"; }

  /// Makes a script the compiler: it reports itself as version 1.0, and its cubin is the source.
  /// `lines` run before that, with the number of this run in $run.
  void use_fake_nvcc(const std::string& lines = "") {
    const std::filesystem::path nvcc = folder() / "a 'toolkit'" / "nvcc";
    make_folders(nvcc.parent_path());
    std::ofstream(nvcc) << R"(#!/bin/sh
case "$1" in --version) echo "fake nvcc 1.0"; exit 0;; esac
folder=$(dirname "$0")
echo "$@" >>"$folder/runs"
run=$(wc -l <"$folder/runs")
)" << lines << R"(
for last; do [ "$previous" = -o ] && output=$last; previous=$last; done
cat "$last" >"$output"
)";
    ASSERT_EQ(::chmod(nvcc.c_str(), 0755), 0);
    std::ofstream(runs_file()).flush();
    ASSERT_EQ(::chmod(runs_file().c_str(), 0666), 0);
    ::setenv("EP_JIT_NVCC_COMPILER", nvcc.c_str(), 1);
  }

  /// How often it compiled.
  std::ptrdiff_t num_runs() const {
    const std::string runs = read_file(runs_file()).value_or("");
    return std::count(runs.begin(), runs.end(), '\n');
  }

  std::filesystem::path runs_file() const { return folder() / "a 'toolkit'" / "runs"; }

 private:
  static void unset_all() {
    for (const config::Variable& variable : config::kVariables) {
      ::unsetenv(variable.name);
      ::unsetenv(("DJ_" + std::string(variable.name).substr(3)).c_str());
    }
  }
  static void restore(const char* name, const std::optional<std::string>& value) {
    if (value) {
      ::setenv(name, value->c_str(), 1);
    } else {
      ::unsetenv(name);
    }
  }

  std::optional<std::string> home_ = config::read_environment("HOME");
  std::optional<std::string> tmpdir_ = config::read_environment("TMPDIR");
  ScopedFolder folder_{std::filesystem::temp_directory_path()};
};

}  // namespace deep_ep::testing
