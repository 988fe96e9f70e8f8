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
#include <vector>

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

inline constexpr Variable kCudaBulkCopies{
    "EP_CUDA_BULK_COPIES",
    "0: kernels move rows by ordinary loads and stores also where the GPU has bulk copies", "1"};

// The JIT's. Each EP_JIT_<name> that is unset is also read as DJ_JIT_<name>. A switch is an
// integer, true, false, yes or no.
inline constexpr Variable kJitCacheDir{
    "EP_JIT_CACHE_DIR",
    "folders of compiled kernels, separated by ':'; all are searched, the first is written",
    "$HOME/.dj"};
inline constexpr Variable kJitNvccCompiler{
    "EP_JIT_NVCC_COMPILER", "path of an nvcc that compiles the kernels instead of NVRTC", "NVRTC"};
inline constexpr Variable kJitCppStandard{"EP_JIT_CPP_STANDARD",
                                          "C++ standard of the kernels, at least 20", "20"};
inline constexpr Variable kJitDebug{
    "EP_JIT_DEBUG",
    "switch: all of PRINT_COMPILER_COMMAND, PTXAS_VERBOSE, WITH_LINEINFO and DUMP_ASM", "0"};
inline constexpr Variable kJitPrintCompilerCommand{
    "EP_JIT_PRINT_COMPILER_COMMAND", "switch: print each compiler command on stderr", "0"};
inline constexpr Variable kJitPtxasVerbose{
    "EP_JIT_PTXAS_VERBOSE", "switch: print the registers and memory of each kernel compiled", "0"};
inline constexpr Variable kJitCheckNoSpills{"EP_JIT_CHECK_NO_SPILLS",
                                            "switch: refuse kernels that spill registers", "0"};
inline constexpr Variable kJitCheckNoLocalMemory{
    "EP_JIT_CHECK_NO_LOCAL_MEMORY", "switch: refuse kernels that use local memory", "0"};
inline constexpr Variable kJitWithLineinfo{
    "EP_JIT_WITH_LINEINFO", "switch: source lines in the kernels, for profilers", "0"};
inline constexpr Variable kJitDumpPtx{
    "EP_JIT_DUMP_PTX", "switch: keep the PTX of each kernel compiled in the cache", "0"};
inline constexpr Variable kJitDumpSass{
    "EP_JIT_DUMP_SASS", "switch: keep the disassembly of each kernel compiled in the cache", "0"};
inline constexpr Variable kJitDumpAsm{"EP_JIT_DUMP_ASM", "switch: both DUMP_PTX and DUMP_SASS",
                                      "0"};
inline constexpr Variable kNvrtcLibrary{"EP_NVRTC_LIBRARY", "path of the NVRTC library to use",
                                        "searched for"};

/// All of them.
inline constexpr std::array kVariables{kHostId,
                                       kTimeoutSecs,
                                       kBufferDebug,
                                       kCpuThreads,
                                       kTestDelayUs,
                                       kCudaBulkCopies,
                                       kJitCacheDir,
                                       kJitNvccCompiler,
                                       kJitCppStandard,
                                       kJitDebug,
                                       kJitPrintCompilerCommand,
                                       kJitPtxasVerbose,
                                       kJitCheckNoSpills,
                                       kJitCheckNoLocalMemory,
                                       kJitWithLineinfo,
                                       kJitDumpPtx,
                                       kJitDumpSass,
                                       kJitDumpAsm,
                                       kNvrtcLibrary};

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

/// EP_CUDA_BULK_COPIES: false only for 0.
bool cuda_bulk_copies();

/// How kernels are compiled.
struct JitSettings {
  std::optional<std::string> nvcc_compiler = std::nullopt;  ///< nothing: NVRTC
  int cpp_standard = 20;
  bool debug = false;  ///< sets all but the checks, and reports what is otherwise passed over
  bool print_command = false;
  bool ptxas_verbose = false;
  bool check_no_spills = false;
  bool check_no_local_memory = false;
  bool with_lineinfo = false;
  bool dump_ptx = false;
  bool dump_sass = false;  ///< asked for by name, not by `debug`: must be possible
};

/// EP_JIT_*. Throws kInvalidArgument, naming variable and value, for one that cannot be read.
JitSettings jit_settings();

/// EP_JIT_CACHE_DIR, or the default; none if there is no home folder either. Throws
/// kInvalidArgument for an empty value or an empty folder name in it.
std::vector<std::string> jit_cache_dirs();

/// EP_NVRTC_LIBRARY, nothing if unset.
std::optional<std::string> nvrtc_library();

/// Value of any environment variable, nothing if unset or empty.
std::optional<std::string> read_environment(const char* name);

/// The integer that `text` is from end to end, nothing if it is none or too large.
std::optional<std::int64_t> parse_integer(std::string_view text) noexcept;

}  // namespace deep_ep::config
