#include "base/config.hpp"

#include <strings.h>

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <system_error>

#include "base/check.hpp"

namespace deep_ep::config {
namespace {

template <typename Number>
std::optional<Number> parse_number(std::string_view text) noexcept {
  Number value{};
  const char* const end = text.data() + text.size();
  // from_chars: the same result in every locale, and no white space or sign that strtol would skip
  const auto [parsed_end, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc{} || parsed_end != end) return std::nullopt;
  return value;
}

/// An integer in [0, largest]; 0 if unset.
int read_int(const Variable& variable, int largest) {
  const std::optional<std::string> text = read_environment(variable.name);
  if (!text) return 0;
  const std::int64_t value = parse_integer(*text).value_or(-1);
  require(value >= 0 && value <= largest, variable.name, " must be an integer in [0, ", largest,
          "], got '", *text, "'");
  return static_cast<int>(value);
}

/// A variable that is set, under the name it was found by.
struct Setting {
  std::string name;
  std::string value;
};

/// EP_JIT_<name>, else DJ_JIT_<name>, which the original of the API shares with other libraries.
std::optional<Setting> read_jit(const Variable& variable, bool is_empty_unset = true) {
  const std::string name = variable.name;
  for (const std::string& spelling : {name, "DJ_" + name.substr(3)}) {
    const char* const value = std::getenv(spelling.c_str());
    if (value == nullptr || (is_empty_unset && *value == '\0')) continue;
    return Setting{spelling, value};
  }
  return std::nullopt;
}

/// True, false, yes, no in any case, or an integer; false if unset.
bool read_jit_switch(const Variable& variable) {
  const std::optional<Setting> setting = read_jit(variable);
  if (!setting) return false;
  const auto is = [&](const char* word) { return ::strcasecmp(setting->value.c_str(), word) == 0; };
  if (is("true") || is("yes")) return true;
  if (is("false") || is("no")) return false;
  const std::optional<std::int64_t> number = parse_integer(setting->value);
  require(number.has_value(), setting->name, " must be true, false, yes, no or an integer, got '",
          setting->value, "'");
  return number.value_or(0) != 0;
}

int read_jit_cpp_standard() {
  const std::optional<Setting> setting = read_jit(kJitCppStandard);
  if (!setting) return 20;
  const std::int64_t value = parse_integer(setting->value).value_or(-1);
  require(value >= 20 && value <= 99, setting->name,
          " must be an integer in [20, 99], as in -std=c++20, got '", setting->value, "'");
  return static_cast<int>(value);
}

}  // namespace

std::optional<std::string> read_environment(const char* name) {
  const char* const value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

std::optional<std::int64_t> parse_integer(std::string_view text) noexcept {
  return parse_number<std::int64_t>(text);
}

std::optional<std::string> host_id() { return read_environment(kHostId.name); }

std::chrono::nanoseconds timeout_or(std::chrono::nanoseconds limit) {
  const std::optional<std::string> text = read_environment(kTimeoutSecs.name);
  if (!text) return limit;
  // 1e9 s, some 31 years, keeps nanoseconds since the clock's start within 64 bits
  constexpr double kMaxSecs = 1e9;
  const double secs = parse_number<double>(*text).value_or(0);
  require(secs > 0 && secs <= kMaxSecs, kTimeoutSecs.name,  // which a NaN is not either
          " must be a number of seconds above 0 and at most 1e9, got '", *text, "'");
  return std::chrono::nanoseconds(std::llround(secs * 1e9));
}

int buffer_debug() { return read_int(kBufferDebug, std::numeric_limits<int>::max()); }

int cpu_threads() { return read_int(kCpuThreads, 1024); }

bool cuda_bulk_copies() { return read_environment(kCudaBulkCopies.name).value_or("1") != "0"; }

int test_delay_us() { return read_int(kTestDelayUs, 1000000); }

JitSettings jit_settings() {
  const std::optional<Setting> nvcc = read_jit(kJitNvccCompiler);
  const bool debug = read_jit_switch(kJitDebug);
  const bool dump_asm = read_jit_switch(kJitDumpAsm);
  // every variable is read, so that a bad value is refused whatever the others say
  const auto either = [](const Variable& variable, bool implied) {
    return read_jit_switch(variable) || implied;
  };
  return {.nvcc_compiler = nvcc ? std::optional(nvcc->value) : std::nullopt,
          .cpp_standard = read_jit_cpp_standard(),
          .debug = debug,
          .print_command = either(kJitPrintCompilerCommand, debug),
          .ptxas_verbose = either(kJitPtxasVerbose, debug),
          .check_no_spills = read_jit_switch(kJitCheckNoSpills),
          .check_no_local_memory = read_jit_switch(kJitCheckNoLocalMemory),
          .with_lineinfo = either(kJitWithLineinfo, debug),
          .dump_ptx = either(kJitDumpPtx, debug || dump_asm),
          .dump_sass = either(kJitDumpSass, dump_asm)};
}

std::vector<std::string> jit_cache_dirs() {
  // an empty value is refused: it is a mistake in a script, and the home folder no answer to it
  const std::optional<Setting> setting = read_jit(kJitCacheDir, false);
  if (!setting) {
    const std::optional<std::string> home = read_environment("HOME");
    return home ? std::vector{*home + "/.dj"} : std::vector<std::string>{};
  }
  std::vector<std::string> folders;
  for (std::size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
    end = setting->value.find(':', begin);
    folders.push_back(setting->value.substr(begin, end - begin));
    require(!folders.back().empty(), setting->name,
            " must be folders separated by ':' with none empty, got '", setting->value, "'");
  }
  return folders;
}

std::optional<std::string> nvrtc_library() { return read_environment(kNvrtcLibrary.name); }

}  // namespace deep_ep::config
