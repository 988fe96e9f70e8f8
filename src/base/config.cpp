#include "base/config.hpp"

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

int test_delay_us() { return read_int(kTestDelayUs, 1000000); }

}  // namespace deep_ep::config
