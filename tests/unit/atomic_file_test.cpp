#include "qfilters/atomic_file.h"

#include <algorithm>
#include <array>
#include <csignal>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <string_view>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "qfilters/error.h"

namespace qfilters {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class AtomicFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = ::testing::TempDir() + "qfilters_XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
    file_ = folder_ / "file";
  }

  void TearDown() override { fs::remove_all(folder_); }

  static std::string read(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  [[nodiscard]] std::ptrdiff_t files() const {
    return std::distance(fs::directory_iterator(folder_), {});
  }

  // The message of the Error kFile that `action` must throw.
  static std::string message_of(const std::function<void()>& action) {
    try {
      action();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kFile);
      return error.what();
    }
    ADD_FAILURE() << "nothing was thrown";
    return "";
  }

  fs::path folder_;
  fs::path file_;
};

// Makes writes beyond `bytes` fail, as on a full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &old_);
    const rlimit limit{bytes, old_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    old_handler_ = std::signal(SIGXFSZ, SIG_IGN);
  }

  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &old_);
    std::signal(SIGXFSZ, old_handler_);
  }

 private:
  rlimit old_ = {};
  void (*old_handler_)(int) = SIG_DFL;
};

TEST_F(AtomicFileTest, WritesANewFile) {
  write_file_atomically(file_, "content");
  EXPECT_EQ(read(file_), "content");
  EXPECT_EQ(files(), 1);
}

TEST_F(AtomicFileTest, WritesBytesOfAnyValue) {
  constexpr std::array<std::byte, 3> kBytes = {
      std::byte{0}, std::byte{0xFF}, std::byte{'\n'}};
  write_file_atomically(file_, kBytes);
  EXPECT_EQ(read(file_), std::string("\0\xFF\n", 3));
}

TEST_F(AtomicFileTest, WritesAnEmptyFile) {
  write_file_atomically(file_, "");
  EXPECT_TRUE(fs::exists(file_));
  EXPECT_EQ(read(file_), "");
}

TEST_F(AtomicFileTest, ReplacesAnExistingFile) {
  write_file_atomically(file_, "a longer old content");
  write_file_atomically(file_, "new");
  EXPECT_EQ(read(file_), "new");
  EXPECT_EQ(files(), 1);
}

TEST_F(AtomicFileTest, WritesIntoTheWorkingFolder) {
  const fs::path old = fs::current_path();
  fs::current_path(folder_);
  write_file_atomically("file", "content");
  fs::current_path(old);
  EXPECT_EQ(read(file_), "content");
}

TEST_F(AtomicFileTest, GivesANewFileTheUsualPermissions) {
  const mode_t mask = ::umask(027);
  write_file_atomically(file_, "content");
  ::umask(mask);
  EXPECT_EQ(fs::status(file_).permissions(), fs::perms(0640));
}

TEST_F(AtomicFileTest, KeepsThePermissionsOfAReplacedFile) {
  write_file_atomically(file_, "old");
  fs::permissions(file_, fs::perms(0604));
  write_file_atomically(file_, "new");
  EXPECT_EQ(fs::status(file_).permissions(), fs::perms(0604));
}

TEST_F(AtomicFileTest, WritesThroughASymbolicLink) {
  write_file_atomically(file_, "old");
  fs::create_symlink("file", folder_ / "link");
  write_file_atomically(folder_ / "link", "new");
  EXPECT_TRUE(fs::is_symlink(folder_ / "link"));
  EXPECT_EQ(read(file_), "new");
}

TEST_F(AtomicFileTest, WritesWhereADanglingLinkPoints) {
  fs::create_directory(folder_ / "below");
  fs::create_symlink("below/second", folder_ / "first");
  fs::create_symlink(file_, folder_ / "below" / "second");
  fs::create_symlink("../other", folder_ / "below" / "up");
  fs::create_symlink("below", folder_ / "folder");
  check_writable(folder_ / "first");
  EXPECT_FALSE(fs::exists(file_));
  write_file_atomically(folder_ / "first", "content");
  EXPECT_EQ(read(file_), "content");
  write_file_atomically(folder_ / "folder" / "up", "more");
  EXPECT_EQ(read(folder_ / "other"), "more");
  for (const char* link : {"first", "below/second", "below/up", "folder"}) {
    EXPECT_TRUE(fs::is_symlink(folder_ / link)) << link;
  }
  EXPECT_EQ(files(), 5);
}

TEST_F(AtomicFileTest, RejectsLinksThatLeadNowhere) {
  fs::create_symlink("loop", folder_ / "loop");
  fs::create_symlink("there", folder_ / "here");
  fs::create_symlink("here", folder_ / "there");
  fs::create_symlink("missing/file", folder_ / "link");
  for (const char* loop : {"loop", "here"}) {
    EXPECT_THAT(
        message_of([&] { write_file_atomically(folder_ / loop, "content"); }),
        HasSubstr("Too many levels of symbolic links"));
  }
  EXPECT_THAT(
      message_of([&] { write_file_atomically(folder_ / "link", "content"); }),
      HasSubstr("No such file or directory"));
  EXPECT_EQ(files(), 4);
}

TEST_F(AtomicFileTest, LeavesAnExistingFileWhenTheDiskIsFull) {
  write_file_atomically(file_, "old");
  const std::string large(1 << 20, 'x');
  {
    const FileSizeLimit limit(4096);
    EXPECT_THAT(
        message_of([&] { write_file_atomically(file_, large); }),
        HasSubstr(file_.string()));
  }
  EXPECT_EQ(read(file_), "old");
  EXPECT_EQ(files(), 1);
}

TEST_F(AtomicFileTest, NamesPathAndReasonForAMissingFolder) {
  const fs::path path = folder_ / "missing" / "file";
  const std::string message =
      message_of([&] { write_file_atomically(path, "content"); });
  EXPECT_THAT(message, HasSubstr(path.string()));
  EXPECT_THAT(message, HasSubstr("No such file or directory"));
}

TEST_F(AtomicFileTest, RejectsAFileAsFolder) {
  write_file_atomically(file_, "old");
  EXPECT_THAT(
      message_of([&] { write_file_atomically(file_ / "below", "content"); }),
      HasSubstr("Not a directory"));
}

TEST_F(AtomicFileTest, RejectsAFolderWithoutWritePermission) {
  if (::geteuid() == 0) GTEST_SKIP() << "root may write anywhere";
  fs::permissions(folder_, fs::perms(0500));
  const std::string written =
      message_of([&] { write_file_atomically(file_, "content"); });
  const std::string checked = message_of([&] { check_writable(file_); });
  fs::permissions(folder_, fs::perms(0700));
  EXPECT_THAT(written, HasSubstr("Permission denied"));
  EXPECT_THAT(checked, HasSubstr("Permission denied"));
}

TEST_F(AtomicFileTest, RejectsWhatIsNoRegularFile) {
  const std::array<fs::path, 4> paths = {
      folder_, folder_ / "", fs::path("/dev/null"), fs::path()};
  for (const fs::path& path : paths) {
    SCOPED_TRACE(path);
    message_of([&] { write_file_atomically(path, "content"); });
    message_of([&] { check_writable(path); });
  }
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
}

TEST_F(AtomicFileTest, ChecksANewFileAndLeavesNothing) {
  check_writable(file_);
  EXPECT_EQ(files(), 0);
}

TEST_F(AtomicFileTest, ChecksAnExistingFileWithoutTouchingIt) {
  write_file_atomically(file_, "old");
  const auto time = fs::last_write_time(file_);
  check_writable(file_);
  EXPECT_EQ(read(file_), "old");
  EXPECT_EQ(fs::last_write_time(file_), time);
  EXPECT_EQ(files(), 1);
}

TEST_F(AtomicFileTest, ChecksThatTheFolderExists) {
  const fs::path path = folder_ / "missing" / "file";
  EXPECT_THAT(
      message_of([&] { check_writable(path); }), HasSubstr(path.string()));
}

}  // namespace
}  // namespace qfilters
