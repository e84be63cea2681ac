#include "qfilters/atomic_file.h"

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "qfilters/error.h"

namespace qfilters {
namespace {

namespace fs = std::filesystem;

constexpr int kMostLinks = 40;  // as the kernel

// A new file beside the one it shall become; removed again unless committed.
class TemporaryFile {
 public:
  TemporaryFile(const char* operation, const fs::path& path)
      : operation_(operation), path_(path), target_(resolve()) {
    static std::atomic<unsigned> counter{0};
    const fs::path folder = target_.parent_path();
    do {
      const std::string name = ".qfilters-" + std::to_string(::getpid()) + "-" +
                               std::to_string(counter++) + ".tmp";
      temporary_ = folder / name;
      file_ = ::open(
          temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    } while (file_ < 0 && (errno == EEXIST || errno == EINTR));
    if (file_ < 0) fail(errno);
  }

  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  ~TemporaryFile() {
    if (file_ >= 0) ::close(file_);
    if (!committed_) ::unlink(temporary_.c_str());
  }

  void write(std::span<const std::byte> content) {
    while (!content.empty()) {
      const ssize_t written = ::write(file_, content.data(), content.size());
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail(errno);
      content = content.subspan(static_cast<std::size_t>(written));
    }
  }

  void commit() {
    struct stat old = {};
    if (::stat(target_.c_str(), &old) == 0 &&
        ::fchmod(file_, old.st_mode & 07777) != 0) {
      fail(errno);
    }
    if (::fsync(file_) != 0) fail(errno);
    if (::close(std::exchange(file_, -1)) != 0) fail(errno);
    if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail(errno);
    committed_ = true;
    sync_folder();
  }

 private:
  // The file to make or replace: through symbolic links, so that they stay
  // links. Anything but a regular file, say /dev/null, must not be renamed
  // over.
  [[nodiscard]] fs::path resolve() const {
    if (!path_.has_filename()) fail("it names no file");
    std::error_code error;
    const fs::file_status status = fs::status(path_, error);
    // A new file is fine; a name that cannot be looked up is not.
    if (status.type() == fs::file_type::none) fail(error.value());
    if (fs::exists(status) && !fs::is_regular_file(status)) {
      fail("it is not a regular file");
    }
    // By hand: a link may point to what does not exist yet. Loops have failed
    // above; the limit is for links that change meanwhile.
    fs::path target = path_;
    for (int links = 0; fs::is_symlink(fs::symlink_status(target, error));
         ++links) {
      if (links == kMostLinks) fail(ELOOP);
      target = target.parent_path() / fs::read_symlink(target, error);
      if (error) fail(error.value());
    }
    return target;
  }

  // Makes the new name survive a power cut. The file is complete either way
  // and some file systems cannot do this, so a failure is ignored.
  void sync_folder() const {
    const fs::path folder =
        target_.has_parent_path() ? target_.parent_path() : fs::path(".");
    const int file = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (file < 0) return;
    ::fsync(file);
    ::close(file);
  }

  [[noreturn]] void fail(int error) const {
    fail(std::generic_category().message(error));
  }

  [[noreturn]] void fail(std::string_view reason) const {
    throw Error(
        ErrorKind::kFile,
        std::string(operation_) + ": cannot write '" + path_.string() +
            "': " + std::string(reason));
  }

  const char* operation_;
  fs::path path_;
  fs::path target_;
  fs::path temporary_;
  int file_ = -1;
  bool committed_ = false;
};

}  // namespace

void write_file_atomically(
    const fs::path& path, std::span<const std::byte> content) {
  TemporaryFile file("write_file_atomically", path);
  file.write(content);
  file.commit();
}

void write_file_atomically(const fs::path& path, std::string_view content) {
  write_file_atomically(path, std::as_bytes(std::span(content)));
}

void check_writable(const fs::path& path) {
  const TemporaryFile file("check_writable", path);
}

}  // namespace qfilters
