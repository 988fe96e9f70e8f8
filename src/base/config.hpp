#pragma once
// The environment variables of the library: the one place that names, explains and reads them.
//
// Each is read when it is used, not when the library is loaded, so that a program may set it after
// that. An empty value counts as unset.
#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace deep_ep::config {

/// One environment variable, as documentation prints it.
struct Variable {
  const char* name;
  const char* meaning;
  const char* default_value;
};

inline constexpr Variable kHostId{
    "EP_HOST_ID", "identity of this host: ranks with equal values form one scale-up domain",
    "the kernel's boot id"};
inline constexpr Variable kTimeoutSecs{
    "EP_TIMEOUT_SECS", "seconds that a call waits for other ranks, fractions allowed",
    "the limit given to the buffer"};
inline constexpr Variable kBufferDebug{"EP_BUFFER_DEBUG",
                                       "above 0, buffers report what they plan and allocate", "0"};
inline constexpr Variable kCpuThreads{"EP_CPU_THREADS",
                                      "worker threads of a rank on the CPU backend; 0 chooses by "
                                      "the number of processors and ranks",
                                      "0"};

inline constexpr Variable kTestDelayUs{
    "EP_TEST_DELAY_US",
    "for tests: each step of a call is delayed by a random time of at most so many microseconds",
    "0"};

/// All of them.
inline constexpr std::array kVariables{kHostId, kTimeoutSecs, kBufferDebug, kCpuThreads,
                                       kTestDelayUs};

/// EP_HOST_ID, nothing if unset.
std::optional<std::string> host_id();

/// EP_TIMEOUT_SECS, `limit` if unset. Throws kInvalidArgument unless it is in (0, 1e9].
std::chrono::nanoseconds timeout_or(std::chrono::nanoseconds limit);

/// EP_BUFFER_DEBUG. Throws kInvalidArgument unless it is an integer of at least 0.
int buffer_debug();

/// EP_CPU_THREADS. Throws kInvalidArgument unless it is an integer in [0, 1024].
int cpu_threads();

/// EP_TEST_DELAY_US. Throws kInvalidArgument unless it is an integer in [0, 10^6].
int test_delay_us();

/// Value of any environment variable, nothing if unset or empty.
std::optional<std::string> read_environment(const char* name);

/// The integer that `text` is from end to end, nothing if it is none or too large.
std::optional<std::int64_t> parse_integer(std::string_view text) noexcept;

}  // namespace deep_ep::config
