#include "jit/nvcc.hpp"

#include <filesystem>
#include <map>
#include <mutex>
#include <system_error>
#include <utility>

#include "base/check.hpp"
#include "base/config.hpp"
#include "jit/kernel_sources.hpp"
#include "os/file.hpp"
#include "os/program.hpp"
#include "os/system_error.hpp"

namespace deep_ep::jit {
namespace {

namespace fs = std::filesystem;

fs::path temporary_root() {
  std::error_code error;
  fs::path folder = fs::temp_directory_path(error);
  if (error) throw_system_error(error.value(), "TMPDIR");
  return folder;
}

/// Runs one of the toolkit's programs. Throws kUnsupported if it cannot be started.
ProgramResult run_tool(const std::vector<std::string>& arguments) {
  try {
    return run_program(arguments);
  } catch (const Error& error) {
    throw Error(ErrorCode::kUnsupported, concat("cannot run ", arguments[0], ": ", error.what()));
  }
}

std::string failure_text(const std::vector<std::string>& arguments, const ProgramResult& result) {
  return concat(command_line(arguments), ": exit status ", result.exit_status, "\n", result.output);
}

std::string ask_version(const std::string& nvcc) {
  const std::vector<std::string> arguments{nvcc, "--version"};
  const ProgramResult result = run_tool(arguments);
  if (result.exit_status != 0) {
    throw Error(ErrorCode::kUnsupported, failure_text(arguments, result));
  }
  return result.output;
}

void write_headers(const fs::path& folder) {
  for (const EmbeddedFile& header : kernel_headers()) {
    const fs::path path = folder / header.name;
    make_folders(path.parent_path());
    write_new_file(path, header.text);
  }
}

NvccOutput run_nvcc(const NvccJob& job, const char* kind) {
  const ScopedFolder folder(temporary_root());
  const fs::path source = folder.path() / "kernel.cu";
  const fs::path output = folder.path() / "kernel.out";
  write_headers(folder.path());
  write_new_file(source, job.source);

  std::vector<std::string> arguments{job.nvcc, kind};
  arguments.insert(arguments.end(), job.options.begin(), job.options.end());
  arguments.insert(arguments.end(),
                   {"-I", folder.path().string(), "-o", output.string(), source.string()});
  ProgramResult result = run_tool(arguments);
  std::optional<std::string> bytes = read_file(output);
  if (result.exit_status != 0 || !bytes || bytes->empty()) {
    throw Error(ErrorCode::kDevice, failure_text(arguments, result));
  }
  return {.bytes = *std::move(bytes), .log = std::move(result.output)};
}

std::string find_cuobjdump(const std::optional<std::string>& nvcc) {
  std::vector<fs::path> folders;
  if (nvcc) folders.push_back(fs::path(*nvcc).parent_path());
  for (const char* const variable : {"CUDA_HOME", "CUDA_PATH"}) {
    if (const auto root = config::read_environment(variable)) folders.push_back(*root + "/bin");
  }
  for (const fs::path& folder : folders) {
    std::error_code error;
    if (fs::exists(folder / "cuobjdump", error)) return (folder / "cuobjdump").string();
  }
  const char* const fallback = "/usr/local/cuda/bin/cuobjdump";
  std::error_code error;
  return fs::exists(fallback, error) ? fallback : "cuobjdump";  // the latter is looked up in PATH
}

}  // namespace

std::string nvcc_version(const std::string& nvcc) {
  static std::mutex mutex;
  static std::map<std::string, std::string> versions;
  std::string text;
  {
    const std::scoped_lock lock(mutex);
    const auto [known, is_new] = versions.try_emplace(nvcc);
    if (is_new) {
      try {
        known->second = ask_version(nvcc);
      } catch (...) {
        versions.erase(known);
        throw;
      }
    }
    text = known->second;
  }
  for (const char* const variable : {"NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"}) {
    if (const auto flags = config::read_environment(variable)) text += *flags + '\n';
  }
  return text;
}

NvccOutput nvcc_compile(const NvccJob& job) { return run_nvcc(job, "-cubin"); }

NvccOutput nvcc_compile_to_ptx(const NvccJob& job) { return run_nvcc(job, "-ptx"); }

std::string disassemble(const std::string& cubin, const std::optional<std::string>& nvcc) {
  const ScopedFolder folder(temporary_root());
  const fs::path file = folder.path() / "kernel.cubin";
  write_new_file(file, cubin);
  const std::vector<std::string> arguments{find_cuobjdump(nvcc), "--dump-sass", file.string()};
  const ProgramResult result = run_tool(arguments);
  if (result.exit_status != 0) {
    throw Error(ErrorCode::kUnsupported, failure_text(arguments, result));
  }
  return result.output;
}

}  // namespace deep_ep::jit
