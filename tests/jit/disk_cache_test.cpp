#include "jit/disk_cache.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <string>
#include <thread>

#include "jit/digest.hpp"
#include "os/file.hpp"
#include "support/errors.hpp"
#include "support/forked_process.hpp"
#include "support/threads.hpp"

namespace deep_ep::jit {
namespace {

namespace fs = std::filesystem;
using deep_ep::testing::error_from;
using deep_ep::testing::ForkedProcess;
using deep_ep::testing::is_error;
using deep_ep::testing::run_threads;
using std::chrono::milliseconds;
using std::chrono::seconds;

const std::string kName = "ep_move.0123456789abcdef0123456789abcdef";

std::vector<DiskCache::File> files_of(const std::string& cubin) {
  return {{"kernel.cu", "source"}, {"kernel.cubin", cubin}, {"kernel.log", "log"}};
}

class DiskCacheTest : public ::testing::Test {
 protected:
  fs::path root() const { return folder_.path() / "first"; }
  fs::path second_root() const { return folder_.path() / "second"; }
  DiskCache disk() const { return DiskCache({root(), second_root()}); }
  DiskCache second_disk() const { return DiskCache({second_root()}); }
  fs::path entry() const { return root() / "cache" / kName; }

  std::string found() const {
    const auto entry = disk().find(kName);
    return entry ? entry->cubin : "nothing";
  }
  bool is_tmp_empty() const { return fs::is_empty(root() / "tmp"); }

  void overwrite(const fs::path& path, const std::string& bytes) const {
    std::ofstream(path, std::ios::trunc) << bytes;
  }
  void age(const fs::path& path, std::chrono::hours hours) const {
    fs::last_write_time(path, fs::file_time_type::clock::now() - hours);
  }

 private:
  ScopedFolder folder_{fs::temp_directory_path()};
};

TEST_F(DiskCacheTest, FindsWhatWasStored) {
  EXPECT_EQ(found(), "nothing");
  EXPECT_EQ(disk().store(kName, files_of("cubin")), entry());
  const auto found_entry = disk().find(kName);
  ASSERT_TRUE(found_entry);
  EXPECT_EQ(found_entry->folder, entry());
  EXPECT_EQ(found_entry->cubin, "cubin");
  EXPECT_EQ(found_entry->log, "log");
  EXPECT_EQ(read_file(entry() / "kernel.cu"), "source");
  EXPECT_TRUE(fs::exists(entry() / ".committed"));
  EXPECT_TRUE(is_tmp_empty());
  EXPECT_FALSE(disk().find("ep_move.other"));
}

TEST_F(DiskCacheTest, SearchesAllRootsAndWritesTheFirst) {
  second_disk().store(kName, files_of("second"));
  EXPECT_EQ(found(), "second");
  EXPECT_EQ(disk().find(kName)->folder, second_root() / "cache" / kName);
  disk().store(kName, files_of("first"));
  EXPECT_EQ(found(), "first");
  EXPECT_EQ(second_disk().find(kName)->cubin, "second");
}

TEST_F(DiskCacheTest, IsNoCacheWithoutARoot) {
  const DiskCache none({});
  EXPECT_FALSE(none.find(kName));
  EXPECT_FALSE(none.lock(kName, seconds(0)).is_held());
  EXPECT_TRUE(
      is_error(error_from([&] { none.store(kName, files_of("")); }), ErrorCode::kSystem, "HOME"));
}

TEST_F(DiskCacheTest, TakesADamagedEntryAsAbsent) {
  const auto damages = {
      std::function([&] { fs::remove(entry() / "kernel.cubin"); }),
      std::function([&] { overwrite(entry() / "kernel.cubin", "cub"); }),
      std::function([&] { overwrite(entry() / "kernel.cubin", "CUBIN"); }),
      std::function([&] { fs::remove(entry() / ".committed"); }),
      std::function([&] { overwrite(entry() / ".committed", ""); }),
      std::function([&] { overwrite(entry() / ".committed", "5 0\n"); }),
      std::function([&] {
        fs::remove_all(entry());
        overwrite(entry(), "a file");
      }),
  };
  for (const auto& damage : damages) {
    disk().store(kName, files_of("cubin"));
    ASSERT_EQ(found(), "cubin");
    damage();
    EXPECT_EQ(found(), "nothing");
  }
}

TEST_F(DiskCacheTest, ReplacesADamagedEntry) {
  disk().store(kName, files_of("cubin"));
  fs::remove(entry() / "kernel.cubin");
  EXPECT_EQ(disk().store(kName, files_of("new")), entry());
  EXPECT_EQ(found(), "new");
  fs::remove_all(entry());
  overwrite(entry(), "a file");
  EXPECT_EQ(disk().store(kName, files_of("newer")), entry());
  EXPECT_EQ(found(), "newer");
  EXPECT_TRUE(is_tmp_empty());
}

TEST_F(DiskCacheTest, LooksFurtherIfTheFirstRootIsDamaged) {
  second_disk().store(kName, files_of("second"));
  disk().store(kName, files_of("first"));
  fs::remove(entry() / "kernel.cubin");
  EXPECT_EQ(found(), "second");
}

TEST_F(DiskCacheTest, KeepsTheEntryOfWhoWasFirst) {
  disk().store(kName, files_of("first"));
  EXPECT_EQ(disk().store(kName, files_of("late")), entry());
  EXPECT_EQ(found(), "first");
  EXPECT_TRUE(is_tmp_empty());
}

TEST_F(DiskCacheTest, ShowsOthersAWholeEntryOrNone) {
  const std::string cubin(100000, 'c');
  std::atomic<bool> is_done = false;
  std::jthread reader([&] {
    while (!is_done) {
      const std::string seen = found();
      EXPECT_TRUE(seen == "nothing" || seen == cubin) << seen.size();
    }
  });
  run_threads(4, [&](int thread) {
    for (int i = 0; i < 10; ++i) {
      disk().store(kName, files_of(cubin));
      if (thread == 0) fs::remove(entry() / "kernel.cubin");
    }
  });
  is_done = true;
  reader.join();
  disk().store(kName, files_of(cubin));
  EXPECT_EQ(found(), cubin);
  EXPECT_TRUE(is_tmp_empty());
}

TEST_F(DiskCacheTest, RefreshesTheTimeOfAnEntryThatIsUsed) {
  disk().store(kName, files_of("cubin"));
  age(entry() / ".committed", std::chrono::hours(1000));
  disk().find(kName);
  EXPECT_GT(fs::last_write_time(entry() / ".committed"),
            fs::file_time_type::clock::now() - std::chrono::hours(1));
}

TEST_F(DiskCacheTest, NamesWhatCannotBeWritten) {
  overwrite(root(), "a file");
  const Error error = error_from([&] { disk().store(kName, files_of("")); });
  EXPECT_TRUE(is_error(error, ErrorCode::kSystem, (root() / "tmp").string() + ": ENOTDIR"));
  EXPECT_FALSE(disk().lock(kName, seconds(0)).is_held());
}

TEST_F(DiskCacheTest, RemovesOnlyItsOwnLeftoversAndOnlyOldOnes) {
  const fs::path tmp = root() / "tmp";
  const std::string id(32, 'a');
  const std::string other_id(32, 'b');
  make_folders(tmp / id);
  overwrite(tmp / id / "kernel.cubin", "half");
  overwrite(tmp / (kName + ".lock"), "");
  make_folders(tmp / other_id);
  make_folders(tmp / "of somebody else");
  for (const auto& name : {id, kName + ".lock", std::string("of somebody else")}) {
    age(tmp / name, std::chrono::hours(25));
  }
  age(tmp / other_id, std::chrono::hours(23));
  disk().store(kName, files_of("cubin"));
  EXPECT_FALSE(fs::exists(tmp / id));
  EXPECT_FALSE(fs::exists(tmp / (kName + ".lock")));
  EXPECT_TRUE(fs::exists(tmp / other_id));
  EXPECT_TRUE(fs::exists(tmp / "of somebody else"));
}

TEST_F(DiskCacheTest, LocksOneNameForOneHolder) {
  {
    const CompileLock lock = disk().lock(kName, seconds(0));
    EXPECT_TRUE(lock.is_held());
    EXPECT_FALSE(disk().lock(kName, milliseconds(20)).is_held());
    EXPECT_TRUE(disk().lock("ep_move.other", seconds(0)).is_held());
  }
  EXPECT_TRUE(is_tmp_empty());
  EXPECT_TRUE(disk().lock(kName, seconds(0)).is_held());
}

TEST_F(DiskCacheTest, WaitsForTheLock) {
  std::atomic<int> num_holders = 0;
  run_threads(8, [&](int) {
    const CompileLock lock = disk().lock(kName, seconds(60));
    EXPECT_TRUE(lock.is_held());
    // Those who wait at the lock's file when it is removed can hold it beside those who come then,
    // which is harmless; so only count that each had its turn.
    ++num_holders;
  });
  EXPECT_EQ(num_holders, 8);
}

TEST_F(DiskCacheTest, FreesTheLockOfAProcessThatIsKilled) {
  ForkedProcess holder([&] {
    const CompileLock lock = disk().lock(kName, seconds(0));
    write_new_file(root() / "is_held", "");
    std::this_thread::sleep_for(seconds(100));
  });
  while (!fs::exists(root() / "is_held")) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_FALSE(disk().lock(kName, milliseconds(20)).is_held());
  holder.kill();
  holder.wait();
  EXPECT_TRUE(disk().lock(kName, seconds(60)).is_held());
}

}  // namespace
}  // namespace deep_ep::jit
