#include "jit/nvrtc.hpp"

#include <dlfcn.h>
#include <link.h>

#include <array>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <system_error>
#include <utility>

#include "base/check.hpp"
#include "base/config.hpp"
#include "base/unique.hpp"
#include "deep_ep/jit.hpp"

namespace deep_ep::jit {
namespace {

// The C interface of NVRTC, of which these parts are the same in versions 12 and 13.
using Result = int;
constexpr Result kSuccess = 0;
constexpr Result kInvalidOption = 5;
using Program = struct ProgramOfNvrtc*;
using SizeFunction = Result (*)(Program, std::size_t*);
using TextFunction = Result (*)(Program, char*);

struct Functions {
  const char* (*error_string)(Result);
  Result (*version)(int*, int*);
  Result (*create)(Program*, const char* source, const char* name, int num_headers,
                   const char* const* headers, const char* const* include_names);
  Result (*destroy)(Program*);
  Result (*compile)(Program, int num_options, const char* const* options);
  SizeFunction log_size, cubin_size, ptx_size;
  TextFunction log, cubin, ptx;
};

struct LibraryTraits {
  using Handle = void*;
  static constexpr Handle kNull = nullptr;
  static void close(Handle handle) noexcept { ::dlclose(handle); }
};
using UniqueLibrary = Unique<LibraryTraits>;

struct Nvrtc {
  Functions call;
  std::string version;  ///< "nvrtc 13.0 (109338064 bytes)"
};

constexpr std::array kFileNames{"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"};

constexpr const char* kHowToGetIt =
    "install it with `pip install nvidia-cuda-nvrtc`, or a CUDA toolkit 12 or 13, or set "
    "EP_NVRTC_LIBRARY to its path";

std::mutex nvrtc_mutex;  // guards the two below
std::vector<std::string> library_folders;
std::map<std::string, Nvrtc> loaded_libraries;  // by EP_NVRTC_LIBRARY; "" if it is unset

template <typename Function>
void resolve(const UniqueLibrary& library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library.get(), name));
  if (function == nullptr) throw Error(ErrorCode::kUnsupported, concat("it has no ", name));
}

Functions resolve_all(const UniqueLibrary& library) {
  Functions call{};
  resolve(library, "nvrtcGetErrorString", call.error_string);
  resolve(library, "nvrtcVersion", call.version);
  resolve(library, "nvrtcCreateProgram", call.create);
  resolve(library, "nvrtcDestroyProgram", call.destroy);
  resolve(library, "nvrtcCompileProgram", call.compile);
  resolve(library, "nvrtcGetProgramLogSize", call.log_size);
  resolve(library, "nvrtcGetProgramLog", call.log);
  resolve(library, "nvrtcGetCUBINSize", call.cubin_size);
  resolve(library, "nvrtcGetCUBIN", call.cubin);
  resolve(library, "nvrtcGetPTXSize", call.ptx_size);
  resolve(library, "nvrtcGetPTX", call.ptx);
  return call;
}

/// The file of an opened library, behind all links; empty if it is gone.
std::filesystem::path path_of(const UniqueLibrary& library) {
  const link_map* map = nullptr;
  if (::dlinfo(library.get(), RTLD_DI_LINKMAP, static_cast<void*>(&map)) != 0) return {};
  std::error_code error;
  return std::filesystem::canonical(map->l_name, error);
}

/// What is in an opened library. Throws kUnsupported, saying why, if it is none that we can use.
Nvrtc examine(UniqueLibrary library) {
  const Functions call = resolve_all(library);
  int major = 0;
  int minor = 0;
  call.version(&major, &minor);
  if (major < 12) {
    throw Error(ErrorCode::kUnsupported,
                concat("it is version ", major, ".", minor, ", at least 12.0 is needed for C++20"));
  }
  const std::filesystem::path path = path_of(library);
  // NVRTC opens this by its bare name, which finds it in a folder of a wheel only if it is loaded
  const std::string builtins = concat("libnvrtc-builtins.so.", major, ".", minor);
  ::dlopen((path.parent_path() / builtins).c_str(), RTLD_NOW | RTLD_LOCAL);
  std::error_code error;
  const std::uintmax_t num_bytes = std::filesystem::file_size(path, error);
  Nvrtc nvrtc{
      .call = call,
      .version = concat("nvrtc ", major, ".", minor, " (", error ? 0 : num_bytes, " bytes)")};
  static_cast<void>(library.release());  // used until the process ends
  return nvrtc;
}

/// Opens and examines one candidate; if it will not do, adds to `reasons` why.
std::optional<Nvrtc> try_library(const std::string& path, int flags, std::string& reasons) {
  UniqueLibrary library(::dlopen(path.c_str(), flags | RTLD_NOW | RTLD_LOCAL));
  if (!library) {
    const char* const reason = ::dlerror();
    reasons += concat("; ", reason != nullptr ? reason : path);
    return std::nullopt;
  }
  try {
    return examine(std::move(library));
  } catch (const Error& error) {
    reasons += concat("; ", path, ": ", error.what());
    return std::nullopt;
  }
}

std::vector<std::filesystem::path> folders_to_search() {
  std::vector<std::filesystem::path> folders;
  for (const char* const variable : {"CUDA_HOME", "CUDA_PATH"}) {
    if (const auto root = config::read_environment(variable)) folders.push_back(*root + "/lib64");
  }
  folders.emplace_back("/usr/local/cuda/lib64");
  folders.insert(folders.end(), library_folders.begin(), library_folders.end());
  return folders;
}

/// The library that EP_NVRTC_LIBRARY names, and no other.
Nvrtc open_nvrtc(const std::string& path) {
  std::string reasons;
  if (auto nvrtc = try_library(path, 0, reasons)) return *std::move(nvrtc);
  throw Error(ErrorCode::kUnsupported,
              concat(config::kNvrtcLibrary.name,
                     " must be the path of a usable NVRTC library, got '", path, "'", reasons));
}

Nvrtc find_nvrtc() {
  std::string unused;  // that a library is not loaded, or not known to the linker, says nothing
  for (const int flags : {RTLD_NOLOAD, 0}) {
    for (const char* const name : kFileNames) {
      if (auto nvrtc = try_library(name, flags, unused)) return *std::move(nvrtc);
    }
  }
  std::string reasons;
  std::string tried = "the libraries of the system";
  for (const std::filesystem::path& folder : folders_to_search()) {
    tried += concat(", ", folder.string());
    for (const char* const name : kFileNames) {
      const std::filesystem::path path = folder / name;
      std::error_code error;
      if (!std::filesystem::exists(path, error)) continue;
      if (auto nvrtc = try_library(path.string(), 0, reasons)) return *std::move(nvrtc);
    }
  }
  throw Error(ErrorCode::kUnsupported, concat("NVRTC, which compiles the kernels, is not in ",
                                              tried, reasons, ": ", kHowToGetIt));
}

/// The library, loaded by the first call. A failure is not kept: what it lacked may come.
const Nvrtc& nvrtc() {
  const std::string path = config::nvrtc_library().value_or(std::string());
  const std::scoped_lock lock(nvrtc_mutex);
  const auto loaded = loaded_libraries.find(path);
  if (loaded != loaded_libraries.end()) return loaded->second;
  return loaded_libraries.emplace(path, path.empty() ? find_nvrtc() : open_nvrtc(path))
      .first->second;
}

class ScopedProgram {
 public:
  ScopedProgram(const Nvrtc& nvrtc, const NvrtcJob& job) : nvrtc_(nvrtc) {
    std::vector<const char*> names;
    std::vector<const char*> texts;
    for (const EmbeddedFile& header : job.headers) {
      names.push_back(header.name);
      texts.push_back(header.text);
    }
    check(nvrtc_.call.create(&program_, job.source.c_str(), "kernel.cu",
                             static_cast<int>(names.size()), texts.data(), names.data()),
          "nvrtcCreateProgram");
  }
  ScopedProgram(const ScopedProgram&) = delete;
  ScopedProgram& operator=(const ScopedProgram&) = delete;
  ~ScopedProgram() { nvrtc_.call.destroy(&program_); }

  Result compile(const std::vector<std::string>& options) {
    std::vector<const char*> raw_options;
    raw_options.reserve(options.size());
    for (const std::string& option : options) raw_options.push_back(option.c_str());
    return nvrtc_.call.compile(program_, static_cast<int>(raw_options.size()), raw_options.data());
  }

  std::string fetch(SizeFunction size, TextFunction text, const char* what) const {
    std::size_t num_bytes = 0;
    check(size(program_, &num_bytes), what);
    std::string bytes(num_bytes, '\0');
    check(text(program_, bytes.data()), what);
    return bytes;
  }

  std::string fetch_text(SizeFunction size, TextFunction text, const char* what) const {
    std::string bytes = fetch(size, text, what);
    if (!bytes.empty()) bytes.pop_back();  // a null character
    return bytes;
  }

 private:
  void check(Result result, const char* what) const {
    if (result == kSuccess) return;
    throw Error(ErrorCode::kDevice, concat(nvrtc_.version, ": ", what, ": ",
                                           nvrtc_.call.error_string(result), " (", result, ")"));
  }

  const Nvrtc& nvrtc_;
  Program program_ = nullptr;
};

}  // namespace

std::string nvrtc_version() { return nvrtc().version; }

NvrtcOutput nvrtc_compile(const NvrtcJob& job) {
  const Nvrtc& library = nvrtc();
  const Functions& call = library.call;
  ScopedProgram program(library, job);
  const Result result = program.compile(job.options);
  std::string log = program.fetch_text(call.log_size, call.log, "nvrtcGetProgramLog");
  if (result != kSuccess) {
    throw Error(result == kInvalidOption ? ErrorCode::kUnsupported : ErrorCode::kDevice,
                concat(library.version, ": ", call.error_string(result), " (", result, ")\n", log));
  }
  return {.cubin = program.fetch(call.cubin_size, call.cubin, "nvrtcGetCUBIN"),
          .ptx = program.fetch_text(call.ptx_size, call.ptx, "nvrtcGetPTX"),
          .log = std::move(log)};
}

}  // namespace deep_ep::jit

namespace deep_ep {

void set_nvrtc_folders(std::vector<std::string> folders) {
  const std::scoped_lock lock(jit::nvrtc_mutex);
  jit::library_folders = std::move(folders);
}

}  // namespace deep_ep
