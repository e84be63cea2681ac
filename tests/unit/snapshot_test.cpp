#include "qfilters/snapshot.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "qfilters/error.h"
#include "qfilters/fingerprint.h"
#include "qfilters/snapshot_file.h"

namespace qfilters {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

Snapshot some_snapshot() {
  Snapshot out;
  const std::vector<std::int32_t> tokens{3, -1, 7};
  out.put_values<std::int32_t>("tokens", tokens);
  out.put_text("sampler", "1 2 3");
  out.put("nothing", {});
  return out;
}

Error error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return {ErrorKind::kRuntime, ""};
}

// With the checksum that belongs to it, so that what is inside gets read.
std::vector<std::byte> sealed(std::vector<std::byte> bytes) {
  bytes.resize(bytes.size() - sizeof(std::uint64_t));
  Fingerprint sum;
  sum.add(bytes);
  const std::uint64_t value = sum.value();
  const auto end = std::as_bytes(std::span(&value, 1));
  bytes.insert(bytes.end(), end.begin(), end.end());
  return bytes;
}

TEST(SnapshotTest, GivesBackWhatWasPutIn) {
  const Snapshot snapshot = Snapshot::decode(some_snapshot().encode());
  EXPECT_EQ(snapshot, some_snapshot());
  EXPECT_EQ(
      snapshot.values<std::int32_t>("tokens"),
      (std::vector<std::int32_t>{3, -1, 7}));
  EXPECT_EQ(snapshot.text("sampler"), "1 2 3");
  EXPECT_TRUE(snapshot.has("nothing"));
  EXPECT_TRUE(snapshot.bytes("nothing").empty());
  EXPECT_FALSE(snapshot.has("something"));
}

TEST(SnapshotTest, NamesAPartThatIsMissingOrOfAnotherSize) {
  const Snapshot snapshot = some_snapshot();
  const auto missing = error_of([&] { (void)snapshot.text("logits"); });
  EXPECT_EQ(missing.kind(), ErrorKind::kFile);
  EXPECT_THAT(missing.what(), HasSubstr("'logits'"));
  const auto odd = error_of([&] { (void)snapshot.values<float>("sampler"); });
  EXPECT_EQ(odd.kind(), ErrorKind::kFile);
  EXPECT_THAT(odd.what(), AllOf(HasSubstr("'sampler'"), HasSubstr("5 bytes")));
}

TEST(SnapshotTest, RefusesEveryFlippedByteAndEveryCut) {
  const auto whole = some_snapshot().encode();
  for (std::size_t i = 0; i < whole.size(); ++i) {
    auto damaged = whole;
    damaged[i] ^= std::byte{0x10};
    EXPECT_THROW((void)Snapshot::decode(damaged), Error) << i;
    EXPECT_THROW((void)Snapshot::decode(std::span(whole).first(i)), Error) << i;
  }
  auto longer = whole;
  longer.push_back(std::byte{0});
  EXPECT_THROW((void)Snapshot::decode(longer), Error);
}

TEST(SnapshotTest, BelievesNoSizeThatTheDataDoesNotHave) {
  const auto whole = some_snapshot().encode();
  for (std::size_t i = 12; i + 16 < whole.size(); ++i) {
    for (const int value : {0x00, 0x01, 0x7F, 0xFF}) {
      auto damaged = whole;
      for (std::size_t b = 0; b < 8; ++b)
        damaged[i + b] = std::byte(value);
      try {
        (void)Snapshot::decode(sealed(damaged));
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kFile) << i << " " << value;
      }
    }
  }
}

TEST(SnapshotTest, SaysThatAnotherVersionIsNotRead) {
  auto bytes = some_snapshot().encode();
  bytes[8] = std::byte{2};
  const auto error = error_of([&] { (void)Snapshot::decode(sealed(bytes)); });
  EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
  EXPECT_THAT(error.what(), HasSubstr("version 2"));
}

class SnapshotFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() /
              ("qfilters_snapshot_" + std::to_string(getpid()));
    fs::create_directory(folder_);
  }

  void TearDown() override { fs::remove_all(folder_); }

  fs::path folder_;
};

TEST_F(SnapshotFileTest, WritesAndReads) {
  const fs::path path = folder_ / "state";
  save_snapshot(some_snapshot(), path);
  EXPECT_EQ(load_snapshot(path), some_snapshot());
  save_snapshot(Snapshot(), path);
  EXPECT_EQ(load_snapshot(path), Snapshot());
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), {}), 1);
}

TEST_F(SnapshotFileTest, NamesTheFileThatItCannotRead) {
  const fs::path absent = folder_ / "absent";
  const fs::path text = folder_ / "text";
  std::ofstream(text) << "This is no snapshot.";
  std::ofstream(folder_ / "empty");
  for (const fs::path& path : {absent, text, folder_, folder_ / "empty"}) {
    const auto error = error_of([&] { (void)load_snapshot(path); });
    EXPECT_EQ(error.kind(), ErrorKind::kFile);
    EXPECT_THAT(error.what(), HasSubstr(path.string()));
  }
}

}  // namespace
}  // namespace qfilters
