#include "os/file.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

#include "support/errors.hpp"

namespace deep_ep {
namespace {

namespace fs = std::filesystem;
using testing::error_from;
using testing::is_error;

TEST(FileTest, ReadsBackWhatWasWritten) {
  const ScopedFolder folder(fs::temp_directory_path());
  const std::string bytes = std::string(100000, 'x') + '\0' + "end";
  write_new_file(folder.path() / "a", bytes);
  EXPECT_EQ(read_file(folder.path() / "a"), bytes);
  write_new_file(folder.path() / "empty", "");
  EXPECT_EQ(read_file(folder.path() / "empty"), "");
}

TEST(FileTest, HasNothingToReadInAFolderOrNowhere) {
  const ScopedFolder folder(fs::temp_directory_path());
  EXPECT_EQ(read_file(folder.path()), std::nullopt);
  EXPECT_EQ(read_file(folder.path() / "absent"), std::nullopt);
}

TEST(FileTest, DoesNotOverwrite) {
  const ScopedFolder folder(fs::temp_directory_path());
  write_new_file(folder.path() / "a", "first");
  const Error error = error_from([&] { write_new_file(folder.path() / "a", "second"); });
  EXPECT_TRUE(is_error(error, ErrorCode::kSystem, (folder.path() / "a").string() + ": EEXIST"));
  EXPECT_EQ(read_file(folder.path() / "a"), "first");
}

TEST(FileTest, NamesAFolderThatCannotBeMadeOrSynced) {
  const ScopedFolder folder(fs::temp_directory_path());
  write_new_file(folder.path() / "a", "");
  const fs::path below = folder.path() / "a" / "b";
  EXPECT_TRUE(is_error(error_from([&] { make_folders(below); }), ErrorCode::kSystem,
                       "mkdir " + below.string() + ": ENOTDIR"));
  EXPECT_TRUE(is_error(error_from([&] { sync_folder(below); }), ErrorCode::kSystem,
                       "open " + below.string() + ": ENOTDIR"));
  EXPECT_TRUE(is_error(error_from([&] { const ScopedFolder scoped(below); }), ErrorCode::kSystem,
                       "mkdir " + below.string()));
}

TEST(FileTest, RemovesAScopedFolderWithAllInIt) {
  const ScopedFolder parent(fs::temp_directory_path());
  fs::path path;
  {
    const ScopedFolder folder(parent.path() / "new" / "newer");
    path = folder.path();
    make_folders(path / "a" / "b");
    write_new_file(path / "a" / "c", "c");
    EXPECT_TRUE(fs::exists(path));
  }
  EXPECT_FALSE(fs::exists(path));
  EXPECT_TRUE(fs::exists(path.parent_path()));
}

TEST(FileTest, DoesNotRemoveWhatALinkPointsTo) {
  const ScopedFolder folder(fs::temp_directory_path());
  make_folders(folder.path() / "kept");
  write_new_file(folder.path() / "kept" / "file", "");
  make_folders(folder.path() / "removed");
  fs::create_directory_symlink(folder.path() / "kept", folder.path() / "removed" / "link");
  remove_all_quietly(folder.path() / "removed");
  EXPECT_FALSE(fs::exists(folder.path() / "removed"));
  EXPECT_TRUE(fs::exists(folder.path() / "kept" / "file"));
}

TEST(FileTest, TakesTheRemovalOfNothingAsDone) { remove_all_quietly("/proc/self/no/such/file"); }

}  // namespace
}  // namespace deep_ep
