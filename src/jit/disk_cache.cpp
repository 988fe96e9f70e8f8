#include "jit/disk_cache.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <thread>

#include "base/check.hpp"
#include "jit/digest.hpp"
#include "os/deadline.hpp"
#include "os/file.hpp"
#include "os/system_error.hpp"

namespace deep_ep::jit {
namespace {

namespace fs = std::filesystem;

constexpr const char* kMarker = ".committed";
constexpr const char* kCubin = "kernel.cubin";
constexpr const char* kLog = "kernel.log";

/// What the marker of a cubin says.
std::string marker_text(const std::string& cubin) {
  return concat(cubin.size(), " ", Digest().add_bytes(cubin).hex(), "\n");
}

fs::path entry_folder(const fs::path& root, const std::string& name) {
  return root / "cache" / name;
}

/// The entry in this folder, unless it is absent or damaged.
std::optional<CacheEntry> read_entry(const fs::path& folder) {
  const std::optional<std::string> marker = read_file(folder / kMarker);
  if (!marker) return std::nullopt;
  std::optional<std::string> cubin = read_file(folder / kCubin);
  if (!cubin || *marker != marker_text(*cubin)) return std::nullopt;
  return CacheEntry{.folder = folder,
                    .cubin = *std::move(cubin),
                    .log = read_file(folder / kLog).value_or(std::string())};
}

/// Whether a name in tmp is one that we give: <id> or <tag>.<digest>.lock. A root may be any
/// folder, so what else is in its tmp is not ours to remove.
bool is_our_leftover(std::string name) {
  constexpr std::size_t kNumDigits = 32;
  if (name.ends_with(".lock")) {
    name.resize(name.size() - 5);
    const std::size_t dot = name.rfind('.');
    if (dot == std::string::npos) return false;
    name.erase(0, dot + 1);
  }
  return name.size() == kNumDigits &&
         name.find_first_not_of("0123456789abcdef") == std::string::npos;
}

/// Removes what killed processes left a day ago or earlier. Failures do not matter.
void remove_old_leftovers(const fs::path& folder) {
  const auto oldest = fs::file_time_type::clock::now() - std::chrono::hours(24);
  std::error_code error;
  for (fs::directory_iterator item(folder, error), end; !error && item != end;
       item.increment(error)) {
    std::error_code time_error;
    const auto time = fs::last_write_time(item->path(), time_error);
    if (!time_error && time < oldest && is_our_leftover(item->path().filename().string())) {
      remove_all_quietly(item->path());
    }
  }
}

/// Makes `from` the entry `to`, unless there is a good one. True if it did.
bool publish(const fs::path& from, const fs::path& to) {
  // one repetition does, unless others damage and publish the same at this very moment
  constexpr int kNumAttempts = 16;
  for (int attempt = 0; attempt < kNumAttempts; ++attempt) {
    if (::rename(from.c_str(), to.c_str()) == 0) return true;
    const int error = errno;
    if (read_entry(to)) return false;  // another process was first
    if (error != EEXIST && error != ENOTEMPTY && error != ENOTDIR) {
      throw_system_error(error, "rename ", from.string(), " to ", to.string());
    }
    // damaged: put it aside in one step, so that nobody sees half of it, then remove it
    const ScopedFolder aside(from.parent_path());
    ::rename(to.c_str(), (aside.path() / "damaged").c_str());
  }
  throw_system_error(EEXIST, "rename ", from.string(), " to ", to.string(), ", which is damaged");
}

}  // namespace

CompileLock::CompileLock(UniqueFd fd, fs::path path) : fd_(std::move(fd)), path_(std::move(path)) {}

CompileLock::~CompileLock() {
  if (!fd_) return;
  ::unlink(path_.c_str());      // while it is held: who waits finds the entry, or compiles
  ::flock(fd_.get(), LOCK_UN);  // close alone would not do if a forked child has a copy
}

std::optional<CacheEntry> DiskCache::find(const std::string& name) const {
  for (const fs::path& root : roots_) {
    const fs::path folder = entry_folder(root, name);
    std::optional<CacheEntry> entry = read_entry(folder);
    if (!entry) continue;
    // the time of last use, for whoever cleans up; a root that cannot be written does without
    ::utimensat(AT_FDCWD, (folder / kMarker).c_str(), nullptr, 0);
    return entry;
  }
  return std::nullopt;
}

CompileLock DiskCache::lock(const std::string& name, std::chrono::nanoseconds timeout) const {
  constexpr auto kFirstPause = std::chrono::milliseconds(1);
  constexpr auto kLongestPause = std::chrono::milliseconds(50);
  if (roots_.empty()) return {};
  const fs::path folder = roots_.front() / "tmp";
  const fs::path path = folder / (name + ".lock");
  std::error_code error;
  fs::create_directories(folder, error);
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  const Deadline deadline(timeout);
  // flock ends with its holder, however that ends. It cannot wait for a limited time, so ask again.
  for (auto pause = kFirstPause; fd; pause = std::min(pause * 2, kLongestPause)) {
    if (::flock(fd.get(), LOCK_EX | LOCK_NB) == 0) return {std::move(fd), path};
    if (errno != EWOULDBLOCK && errno != EINTR) break;
    if (deadline.has_passed()) break;
    std::this_thread::sleep_for(pause);
  }
  return {};
}

fs::path DiskCache::store(const std::string& name, const std::vector<File>& files) const {
  if (roots_.empty())
    throw Error(ErrorCode::kSystem, "no folder for compiled kernels: HOME is unset");
  const fs::path& root = roots_.front();
  const fs::path tmp = root / "tmp";
  const ScopedFolder work(tmp);
  for (const auto& [file_name, bytes] : files) {
    write_new_file(work.path() / file_name, bytes);
  }
  const auto cubin = std::find_if(files.begin(), files.end(),
                                  [](const File& file) { return file.first == kCubin; });
  internal_check(cubin != files.end(), "an entry of the cache has a cubin");
  write_new_file(work.path() / kMarker, marker_text(cubin->second));
  sync_folder(work.path());

  fs::path folder = entry_folder(root, name);
  make_folders(folder.parent_path());
  if (publish(work.path(), folder)) sync_folder(folder.parent_path());
  remove_old_leftovers(tmp);
  return folder;
}

}  // namespace deep_ep::jit
