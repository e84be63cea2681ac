// What the readers of files allocate, counted where C++ code does it.
// libzip and zlib call malloc and are left out: a directory that would make
// them allocate much is refused before they see it (see npz_test.cpp).
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <zip.h>

#include "qfilters/atomic_file.h"
#include "qfilters/error.h"
#include "qfilters/filter_file.h"
#include "qfilters/fingerprint.h"
#include "qfilters/snapshot_file.h"

#include "unit/filter_file_fixture.h"
#include "unit/heap.h"

namespace qfilters {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kGrowth = 4;
constexpr std::size_t kAlwaysAllowed = 4U << 20;

template <typename T>
std::vector<T> ones(std::size_t count) {
  return std::vector<T>(count, T{1});
}

std::string repeated(const std::string& text, std::size_t times) {
  std::string out;
  for (std::size_t i = 0; i < times; ++i) {
    out += text;
  }
  return out;
}

// JSON texts of nearly the longest allowed size that a parser makes the most
// of.
std::vector<std::string> json_bombs() {
  std::string keys = "{";
  for (int i = 0; i < 2800; ++i) {
    keys += '"' + std::to_string(10'000 + i) + "\":[],";
  }
  return {
      std::string(32'700, '['),
      std::string(16'300, '[') + std::string(16'300, ']'),
      repeated(R"({"":)", 6500),
      repeated(R"({"":)", 5400) + "0" + std::string(5400, '}'),
      "[" + repeated("0,", 16'000) + "0]",
      "[" + repeated("[],", 10'500) + "0]",
      "[" + repeated("{},", 10'500) + "0]",
      "[" + repeated("\"\",", 10'500) + "0]",
      keys + R"("version":1,"n_layers":1})",
      '"' + std::string(32'000, 'x') + '"'};
}

class FileMemoryTest : public FilterFileTest {
 protected:
  // Loads a file, or is refused, within the bound; true when it loads.
  static bool loads(const fs::path& path) {
    const std::size_t before = test::heap().live_bytes;
    test::heap().peak_bytes = before;
    bool loaded = true;
    try {
      EXPECT_GT(load_filters(path).layers(), 0U);
    } catch (const Error&) {
      loaded = false;
    }
    const std::size_t used = test::heap().peak_bytes - before;
    EXPECT_LE(used, kGrowth * fs::file_size(path) + kAlwaysAllowed);
    return loaded;
  }

  // The same for a snapshot.
  static bool loads_snapshot(const fs::path& path) {
    const std::size_t before = test::heap().live_bytes;
    test::heap().peak_bytes = before;
    bool loaded = true;
    try {
      static_cast<void>(load_snapshot(path));
    } catch (const Error&) {
      loaded = false;
    }
    EXPECT_LE(
        test::heap().peak_bytes - before,
        kGrowth * fs::file_size(path) + kAlwaysAllowed);
    return loaded;
  }

  bool loads(const std::string& name, const std::string& content) const {
    return loads(write(name, content));
  }

  // Members in really deflated form.
  fs::path write_deflated(const std::vector<Member>& members) const {
    fs::path path = folder_ / "f.npz";
    zip_t* const archive =
        zip_open(path.c_str(), ZIP_CREATE | ZIP_TRUNCATE, nullptr);
    for (const Member& m : members) {
      const auto index = zip_file_add(
          archive,
          m.name.c_str(),
          zip_source_buffer(archive, m.content.data(), m.content.size(), 0),
          0);
      EXPECT_EQ(
          zip_set_file_compression(
              archive, static_cast<zip_uint64_t>(index), ZIP_CM_DEFLATE, 9),
          0);
    }
    EXPECT_EQ(zip_close(archive), 0);
    return path;
  }
};

constexpr std::size_t kMany = std::size_t{1} << 22;
constexpr const char* kManyShape = "(64, 65536)";

TEST_F(FileMemoryTest, StaysBoundedForLargeFiles) {
  const FilterBank bank(
      std::vector<LayerFilters>(16, {64, 4096, ones<float>(kMany / 16)}), {});
  for (const char* name : {"f.npz", "f.safetensors", "f.gguf"}) {
    SCOPED_TRACE(name);
    save_filters(bank, folder_ / name);
    EXPECT_TRUE(loads(folder_ / name));
  }
}

TEST_F(FileMemoryTest, StaysBoundedForEveryNumberTypeOfNpz) {
  for (const std::string& member :
       {npy_of("|i1", kManyShape, std::string(kMany, '\1')),
        npy_of("<f2", kManyShape, bytes_of_all(ones<std::uint16_t>(kMany))),
        npy_of("<f4", kManyShape, bytes_of_all(ones<float>(kMany)), true),
        npy_of("<u8", kManyShape, bytes_of_all(ones<std::uint64_t>(kMany)))}) {
    SCOPED_TRACE(member.substr(10, 20));
    EXPECT_TRUE(loads("f.npz", npz_with_layer(member)));
  }
}

TEST_F(FileMemoryTest, StaysBoundedForManySmallLayers) {
  const FilterBank bank(
      std::vector<LayerFilters>(4096, {1, 1, ones<float>(1)}), {});
  for (const char* name : {"f.safetensors", "f.gguf"}) {
    SCOPED_TRACE(name);
    save_filters(bank, folder_ / name);
    EXPECT_TRUE(loads(folder_ / name));
  }
  std::vector<std::string> tensors;
  std::string data;
  for (std::size_t l = 0; l < 100'000; ++l) {
    tensors.push_back(
        gguf_tensor("blk." + std::to_string(l) + ".q_filter", {1, 1}, 32 * l));
    data += gguf_data({1});
  }
  EXPECT_TRUE(loads("f.gguf", gguf_of(gguf_fields(), tensors, data)));
}

TEST_F(FileMemoryTest, StaysBoundedForWhatInflates) {
  const Member meta{"__meta__.npy", meta_npy(kOneLayer)};
  const std::string zeros(kMany * 2, '\0');
  EXPECT_FALSE(loads(write_deflated(
      {meta, {"layer_0.npy", npy_of("|i1", "(128, 65536)", zeros)}})));
  EXPECT_FALSE(loads(write_deflated(
      {{"__meta__.npy", npy_of("<U2097152", "()", zeros)},
       {"layer_0.npy", layer_npy(1, 1)}})));
  std::vector<Member> members = {
      {"__meta__.npy", meta_npy(R"({"version": 1, "n_layers": 900})")}};
  const std::string layer =
      npy_of("|b1", "(1, 65536)", std::string(65536, '\0'));
  for (int l = 0; l < 900; ++l) {
    members.push_back({"layer_" + std::to_string(l) + ".npy", layer});
  }
  EXPECT_FALSE(loads(write_deflated(members)));
}

TEST_F(FileMemoryTest, StaysBoundedForHostileJson) {
  for (const std::string& json : json_bombs()) {
    SCOPED_TRACE(json.substr(0, 40));
    const std::string inside = R"({"version":1,"n_layers":1,"x":)" + json + "}";
    for (const std::string& text : {json, inside}) {
      loads("f.safetensors", safetensors_of(text, ""));
      loads(write_deflated(
          {{"__meta__.npy", meta_npy(text)},
           {"layer_0.npy", layer_npy(1, 1)}}));
    }
  }
}

TEST_F(FileMemoryTest, StaysBoundedForHostileGguf) {
  std::vector<std::string> fields(200'000, gguf_string("k", ""));
  EXPECT_TRUE(loads("f.gguf", gguf_with(fields)));
  fields.assign(64, gguf_string(std::string(65'535, 'k'), "x"));
  EXPECT_TRUE(loads("f.gguf", gguf_with(fields)));
  const std::string texts = bytes_of(std::uint32_t{8}) +
                            bytes_of(std::uint64_t{500'000}) +
                            std::string(std::size_t{500'000} * 8, '\0');
  EXPECT_TRUE(loads("f.gguf", gguf_with({gguf_field("t", 9, texts)})));
  EXPECT_TRUE(
      loads("f.gguf", gguf_with({gguf_string("t", std::string(kMany, 't'))})));
  // As many tensors as there is room for, all of the same bytes.
  std::vector<std::string> tensors(10'000);
  for (std::size_t l = 0; l < tensors.size(); ++l) {
    tensors[l] =
        gguf_tensor("blk." + std::to_string(l) + ".q_filter", {1024, 1024}, 0);
  }
  EXPECT_FALSE(loads(
      "f.gguf", gguf_of(gguf_fields(), tensors, std::string(kMany, '\0'))));
}

// Every field of a small file, in turn, becomes a huge number: a size, a count
// or an offset among them.
TEST_F(FileMemoryTest, StaysBoundedWhereverANumberIsHuge) {
  for (const std::string name : {"f.npz", "f.safetensors", "f.gguf"}) {
    save_filters(some_filters(), folder_ / name);
    const std::string good = read(folder_ / name);
    for (const std::string& huge :
         {bytes_of(std::uint32_t{0x7FFFFFF0}),
          bytes_of(std::uint64_t{0x000000FFFFFFFFF0}),
          std::string("9999999999999")}) {
      for (std::size_t at = 0; at + huge.size() <= good.size(); at += 3) {
        SCOPED_TRACE(name + " at " + std::to_string(at));
        std::string bad = good;
        bad.replace(at, huge.size(), huge);
        loads(name, bad);
      }
    }
  }
}

TEST_F(FileMemoryTest, StaysBoundedForNoise) {
  for (const std::string name : {"f.npz", "f.safetensors", "f.gguf"}) {
    SCOPED_TRACE(name);
    std::string noise(100'000, '\0');
    std::uint32_t state = 1;
    for (char& byte : noise) {
      state = state * 1664525U + 1013904223U;
      byte = static_cast<char>(state >> 24);
    }
    EXPECT_FALSE(loads(name, noise));
    EXPECT_FALSE(loads(name, std::string(100'000, '\xFF')));
    EXPECT_FALSE(loads(name, std::string(100'000, '\0')));
  }
}

TEST_F(FileMemoryTest, StaysBoundedForSnapshots) {
  const fs::path path = folder_ / "state";
  Snapshot large;
  large.put("rows", std::vector<std::byte>(64U << 20));
  save_snapshot(large, path);
  EXPECT_TRUE(loads_snapshot(path));
  Snapshot many;
  for (std::size_t i = 0; i < Snapshot::kMostParts; ++i) {
    many.put(std::to_string(i), {});
  }
  save_snapshot(many, path);
  EXPECT_TRUE(loads_snapshot(path));
  many.put("one more", {});
  EXPECT_THROW(save_snapshot(many, path), Error);
  EXPECT_TRUE(loads_snapshot(path)) << "as it was";
}

// The number of parts is not believed, nor are there too many of them.
TEST_F(FileMemoryTest, StaysBoundedForHostileSnapshots) {
  constexpr std::size_t kCountAt = 12;  // after magic and version
  Snapshot some;
  for (std::size_t i = 0; i < Snapshot::kMostParts; ++i) {
    some.put(std::to_string(i), {});
  }
  auto bytes = some.encode();
  bytes.resize(bytes.size() - sizeof(std::uint64_t));
  for (int i = 0; i < 1'000'000; ++i) {  // parts "" that replace each other
    bytes.resize(bytes.size() + 2 * sizeof(std::uint64_t));
  }
  for (const std::uint64_t count :
       {std::uint64_t{Snapshot::kMostParts} + 1'000'000, ~std::uint64_t{0}}) {
    std::memcpy(bytes.data() + kCountAt, &count, sizeof(count));
    Fingerprint sum;
    sum.add(bytes);
    const std::uint64_t checksum = sum.value();
    auto sealed = bytes;
    const auto end = std::as_bytes(std::span(&checksum, 1));
    sealed.insert(sealed.end(), end.begin(), end.end());
    write_file_atomically(folder_ / "hostile", sealed);
    EXPECT_FALSE(loads_snapshot(folder_ / "hostile"));
  }
}

}  // namespace
}  // namespace qfilters
