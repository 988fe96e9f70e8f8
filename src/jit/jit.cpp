#include "jit/jit.hpp"

#include <chrono>
#include <cstdio>
#include <exception>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "base/check.hpp"
#include "base/config.hpp"
#include "jit/compiler.hpp"
#include "jit/digest.hpp"
#include "jit/disk_cache.hpp"
#include "jit/kernel_sources.hpp"

namespace deep_ep::jit {
namespace {

/// How long to wait for another process that compiles the same: longer than any compilation, short
/// beside the time-outs of a communicator.
constexpr auto kLockTimeout = std::chrono::seconds(30);

void check_tag(const std::string& tag) {
  constexpr const char* kAllowed =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_";
  require(!tag.empty() && tag.find_first_not_of(kAllowed) == std::string::npos,
          "tag must consist of letters, digits and '_', got '", tag, "'");
}

/// Of every embedded file: any of them may be included, so any change makes new kernels.
const std::string& digest_of_kernel_tree() {
  static const std::string digest = [] {
    Digest of_all;
    for (const auto files : {kernel_headers(), nvrtc_shims()}) {
      for (const EmbeddedFile& file : files) of_all.add(file.name).add(file.text);
    }
    return of_all.hex();
  }();
  return digest;
}

std::string digest_of(const CompilePlan& plan, const std::string& source) {
  Digest digest;
  digest.add(library_version()).add(plan.compiler);
  for (const std::string& flag : plan.flags) digest.add(flag);
  return digest.add(digest_of_kernel_tree()).add(source).hex();
}

std::string json_string(std::string_view text) {
  std::string quoted = "\"";
  for (const char character : text) {
    if (character == '"' || character == '\\') quoted += '\\';
    if (character == '\n') {
      quoted += "\\n";
    } else if (static_cast<unsigned char>(character) < 0x20) {
      quoted += ' ';
    } else {
      quoted += character;
    }
  }
  return quoted + '"';
}

/// For people: nothing reads it back.
std::string meta_json(const CompilePlan& plan, const KernelSpec& spec) {
  return concat("{\n  \"library\": ", json_string(concat("deep_ep ", library_version())),
                ",\n  \"tag\": ", json_string(spec.tag), ",\n  \"arch\": ", json_string(spec.arch),
                ",\n  \"compiler\": ", json_string(plan.compiler),
                ",\n  \"command\": ", json_string(command_of(plan)), "\n}\n");
}

std::vector<DiskCache::File> files_of(const CompilePlan& plan, const KernelSpec& spec,
                                      const CompileOutput& output) {
  std::vector<DiskCache::File> files{{"kernel.cu", spec.source},
                                     {"kernel.cubin", output.cubin},
                                     {"kernel.log", output.log},
                                     {"meta.json", meta_json(plan, spec)}};
  if (!output.ptx.empty()) files.emplace_back("kernel.ptx", output.ptx);
  if (!output.sass.empty()) files.emplace_back("kernel.sass", output.sass);
  return files;
}

std::shared_ptr<const Cubin> make_cubin(const std::string& cubin, std::string log,
                                        std::filesystem::path folder) {
  const std::span bytes = std::as_bytes(std::span(cubin));
  return std::make_shared<const Cubin>(Cubin{
      .image = {bytes.begin(), bytes.end()}, .log = std::move(log), .folder = std::move(folder)});
}

/// Compiles; an error says for what.
CompileOutput compile_named(const CompilePlan& plan, const KernelSpec& spec) {
  try {
    return compile_cubin(plan, spec.source);
  } catch (const Error& error) {
    throw Error(error.code(), concat("kernel ", spec.tag, " for ", spec.arch, ": ", error.what()));
  }
}

/// The folder of the new entry; empty if the disk says no, which is no reason to fail.
std::filesystem::path store_if_possible(const DiskCache& disk, const std::string& name,
                                        const std::vector<DiskCache::File>& files, bool is_told) {
  try {
    return disk.store(name, files);
  } catch (const Error& error) {
    static std::once_flag once;
    if (is_told) {
      std::call_once(once, [&] {
        std::fprintf(stderr, "deep_ep: compiled kernels are not kept: %s\n", error.what());
      });
    }
    return {};
  }
}

std::shared_ptr<const Cubin> find_or_compile(const CompilePlan& plan, const KernelSpec& spec,
                                             const std::string& digest) {
  const std::vector<std::string> roots = config::jit_cache_dirs();
  const DiskCache disk({roots.begin(), roots.end()});
  const std::string name = concat(spec.tag, ".", digest);
  const auto find = [&]() -> std::shared_ptr<const Cubin> {
    std::optional<CacheEntry> entry = disk.find(name);
    if (!entry) return nullptr;
    return make_cubin(entry->cubin, std::move(entry->log), std::move(entry->folder));
  };
  if (auto cubin = find()) return cubin;
  const CompileLock lock = disk.lock(name, kLockTimeout);
  if (auto cubin = find()) return cubin;  // who held the lock has made it
  CompileOutput output = compile_named(plan, spec);
  std::filesystem::path folder =
      store_if_possible(disk, name, files_of(plan, spec, output), plan.settings.debug);
  return make_cubin(output.cubin, std::move(output.log), std::move(folder));
}

}  // namespace

std::shared_ptr<const Cubin> KernelCache::compile(const KernelSpec& spec) {
  check_tag(spec.tag);
  const CompilePlan plan = plan_compile(config::jit_settings(), spec.arch, spec.extra_flags);
  const std::string digest = digest_of(plan, spec.source);

  std::promise<std::shared_ptr<const Cubin>> promise;
  {
    std::unique_lock lock(mutex_);
    const auto known = results_.find(digest);
    if (known != results_.end()) {
      const Result result = known->second;
      lock.unlock();
      return result.get();
    }
    results_.emplace(digest, promise.get_future().share());
  }
  try {
    std::shared_ptr<const Cubin> cubin = find_or_compile(plan, spec, digest);
    promise.set_value(cubin);
    return cubin;
  } catch (...) {
    {
      const std::scoped_lock lock(mutex_);
      results_.erase(digest);
    }
    promise.set_exception(std::current_exception());
    throw;
  }
}

std::shared_ptr<const Cubin> compile(const KernelSpec& spec) {
  static KernelCache cache;
  return cache.compile(spec);
}

}  // namespace deep_ep::jit
