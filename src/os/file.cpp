#include "os/file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <system_error>

#include "os/fd.hpp"
#include "os/process.hpp"
#include "os/system_error.hpp"

namespace deep_ep {
namespace {

void sync_descriptor(const UniqueFd& fd, const std::filesystem::path& path) {
  // EINVAL: a file system that has nothing to bring to a disk
  if (::fsync(fd.get()) != 0 && errno != EINVAL) throw_system_error(errno, "fsync ", path.string());
}

}  // namespace

std::optional<std::string> read_file(const std::filesystem::path& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return std::nullopt;
  std::string bytes;
  std::array<char, 65536> block;
  while (true) {
    const ssize_t num_read = ::read(fd.get(), block.data(), block.size());
    if (num_read == 0) return bytes;
    if (num_read < 0 && errno == EINTR) continue;
    if (num_read < 0) return std::nullopt;
    bytes.append(block.data(), static_cast<std::size_t>(num_read));
  }
}

void write_new_file(const std::filesystem::path& path, std::string_view bytes) {
  const UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!fd) throw_system_error(errno, "open ", path.string());
  while (!bytes.empty()) {
    const ssize_t num_written = ::write(fd.get(), bytes.data(), bytes.size());
    if (num_written < 0 && errno == EINTR) continue;
    if (num_written < 0) throw_system_error(errno, "write ", path.string());
    bytes.remove_prefix(static_cast<std::size_t>(num_written));
  }
  sync_descriptor(fd, path);
}

void sync_folder(const std::filesystem::path& folder) {
  const UniqueFd fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) throw_system_error(errno, "open ", folder.string());
  sync_descriptor(fd, folder);
}

void make_folders(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw_system_error(error.value(), "mkdir ", folder.string());
}

void remove_all_quietly(const std::filesystem::path& path) noexcept {
  std::error_code error;
  try {
    std::filesystem::remove_all(path, error);
  } catch (const std::exception&) {
    return;  // no memory: what is left is a leftover like any other
  }
}

ScopedFolder::ScopedFolder(const std::filesystem::path& parent) : path_(parent / hex(random_id())) {
  make_folders(parent);
  if (::mkdir(path_.c_str(), 0777) != 0) throw_system_error(errno, "mkdir ", path_.string());
}

}  // namespace deep_ep
