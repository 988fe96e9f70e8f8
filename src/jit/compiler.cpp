#include "jit/compiler.hpp"

#include <cstdio>
#include <optional>
#include <string_view>
#include <utility>

#include "base/check.hpp"
#include "jit/nvcc.hpp"
#include "jit/nvrtc.hpp"
#include "jit/ptxas_log.hpp"
#include "os/program.hpp"

namespace deep_ep::jit {
namespace {

void print(const std::string& text) { std::fprintf(stderr, "deep_ep: %s\n", text.c_str()); }

/// sm_<digits>, and perhaps an a or f.
bool is_arch(std::string_view text) {
  if (!text.starts_with("sm_")) return false;
  text.remove_prefix(3);
  if (text.ends_with('a') || text.ends_with('f')) text.remove_suffix(1);
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
}

std::vector<EmbeddedFile> headers_for_nvrtc() {
  const auto headers = kernel_headers();
  const auto shims = nvrtc_shims();
  std::vector<EmbeddedFile> all(headers.begin(), headers.end());
  all.insert(all.end(), shims.begin(), shims.end());
  return all;
}

CompileOutput compile_with_nvrtc(const CompilePlan& plan, const std::string& source) {
  NvrtcOutput output =
      nvrtc_compile({.source = source, .headers = headers_for_nvrtc(), .options = plan.flags});
  return {.cubin = std::move(output.cubin),
          .log = std::move(output.log),
          .ptx = plan.settings.dump_ptx ? std::move(output.ptx) : std::string(),
          .sass = {}};
}

CompileOutput compile_with_nvcc(const CompilePlan& plan, const std::string& nvcc,
                                const std::string& source) {
  const NvccJob job{.nvcc = nvcc, .source = source, .options = plan.flags};
  NvccOutput output = nvcc_compile(job);
  return {.cubin = std::move(output.bytes),
          .log = std::move(output.log),
          .ptx = plan.settings.dump_ptx ? nvcc_compile_to_ptx(job).bytes : std::string(),
          .sass = {}};
}

void check_memory(const config::JitSettings& settings, const std::string& log) {
  if (!settings.check_no_spills && !settings.check_no_local_memory) return;
  const std::vector<FunctionUse> functions = parse_ptxas_log(log);
  if (functions.empty()) {
    throw Error(ErrorCode::kDevice,
                concat("the compiler must report the memory of a kernel that is to be checked for "
                       "spills or local memory, it printed:\n",
                       log));
  }
  for (const FunctionUse& use : functions) {
    const bool is_refused = (settings.check_no_spills && use.has_spills()) ||
                            (settings.check_no_local_memory && use.has_local_memory());
    if (!is_refused) continue;
    throw Error(ErrorCode::kDevice,
                concat("kernels must not use local memory, ", use.name, " has ", use.stack_bytes,
                       " bytes of stack, ", use.spill_store_bytes, " bytes of spill stores and ",
                       use.spill_load_bytes, " bytes of spill loads"));
  }
}

std::string dump_sass(const config::JitSettings& settings, const std::string& cubin) {
  if (!settings.dump_sass && !settings.debug) return {};
  try {
    return disassemble(cubin, settings.nvcc_compiler);
  } catch (const Error& error) {
    if (settings.dump_sass) throw;
    print(concat("no disassembly: ", error.what()));
    return {};
  }
}

}  // namespace

CompilePlan plan_compile(const config::JitSettings& settings, const std::string& arch,
                         const std::vector<std::string>& extra_flags) {
  require(is_arch(arch), "arch must be of the form sm_90a, got '", arch, "'");
  CompilePlan plan{.settings = settings, .compiler = {}, .flags = {}};
  plan.flags = {"-arch=" + arch, concat("-std=c++", settings.cpp_standard)};
  // functions of abi/, which say nothing about host and device, are for both
  if (settings.nvcc_compiler) {
    plan.compiler = nvcc_version(*settings.nvcc_compiler);
    plan.flags.emplace_back("--expt-relaxed-constexpr");
  } else {
    plan.compiler = nvrtc_version();
    plan.flags.emplace_back("-default-device");
    plan.flags.emplace_back("-no-source-include");  // nothing from the working directory
  }
  if (settings.with_lineinfo) plan.flags.emplace_back("-lineinfo");
  if (settings.ptxas_verbose || settings.check_no_spills || settings.check_no_local_memory) {
    plan.flags.emplace_back("--ptxas-options=-v");
  }
  // The checks need -v alone; these make them part of the flags, and so of the cache's key.
  if (settings.check_no_spills) plan.flags.emplace_back("--ptxas-options=-warn-spills");
  if (settings.check_no_local_memory) plan.flags.emplace_back("--ptxas-options=-warn-lmem-usage");
  plan.flags.insert(plan.flags.end(), extra_flags.begin(), extra_flags.end());
  return plan;
}

std::string command_of(const CompilePlan& plan) {
  std::vector<std::string> words{plan.settings.nvcc_compiler.value_or("nvrtc")};
  words.insert(words.end(), plan.flags.begin(), plan.flags.end());
  return command_line(words);
}

CompileOutput compile_cubin(const CompilePlan& plan, const std::string& source) {
  if (plan.settings.print_command) print(command_of(plan));
  const std::optional<std::string>& nvcc = plan.settings.nvcc_compiler;
  CompileOutput output =
      nvcc ? compile_with_nvcc(plan, *nvcc, source) : compile_with_nvrtc(plan, source);
  if (plan.settings.ptxas_verbose) print(output.log);
  check_memory(plan.settings, output.log);
  output.sass = dump_sass(plan.settings, output.cubin);
  return output;
}

}  // namespace deep_ep::jit
