#pragma once
// Small files that must survive a crash whole or not at all, and folders that go with their owner.
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

namespace deep_ep {

/// The bytes of a file, nothing if it cannot be read to its end.
std::optional<std::string> read_file(const std::filesystem::path& path);

/// Makes the file and brings its bytes to the disk. Throws kSystem if it is there already.
void write_new_file(const std::filesystem::path& path, std::string_view bytes);

/// Brings the names within a folder to the disk. Throws kSystem.
void sync_folder(const std::filesystem::path& folder);

/// Makes the folder and those above it where missing. Throws kSystem.
void make_folders(const std::filesystem::path& folder);

/// Removes a file, or a folder with all in it; does not follow links. What cannot be removed stays.
void remove_all_quietly(const std::filesystem::path& path) noexcept;

/// A new folder with a name nobody else has, removed with all in it unless it was renamed.
class ScopedFolder {
 public:
  /// Makes `parent`/<32 hexadecimal digits>, and `parent` where missing. Throws kSystem.
  explicit ScopedFolder(const std::filesystem::path& parent);
  ScopedFolder(const ScopedFolder&) = delete;
  ScopedFolder& operator=(const ScopedFolder&) = delete;
  ~ScopedFolder() { remove_all_quietly(path_); }

  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace deep_ep
