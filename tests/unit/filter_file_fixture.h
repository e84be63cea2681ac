#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "qfilters/error.h"
#include "qfilters/filter_bank.h"
#include "qfilters/filter_file.h"

namespace qfilters {

// Builders of filter files, good and hostile.

template <typename T>
std::string bytes_of(T value) {
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

template <typename T>
std::string bytes_of_all(const std::vector<T>& values) {
  std::string bytes;
  for (const T value : values)
    bytes += bytes_of(value);
  return bytes;
}

inline std::uint32_t crc32(const std::string& bytes) {
  std::uint32_t crc = 0xFFFFFFFFU;
  for (const char byte : bytes) {
    crc ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1U) != 0 ? 0xEDB88320U : 0U);
    }
  }
  return ~crc;
}

// A member of a zip archive; the claims may differ from the content.
struct Member {
  std::string name;
  std::string content;
  std::uint16_t method = 0;
  std::uint32_t claimed_size = 0;  // 0: the content's
};

inline std::string zip_of(const std::vector<Member>& members) {
  using U16 = std::uint16_t;
  using U32 = std::uint32_t;
  std::string archive;
  std::string directory;
  for (const Member& m : members) {
    std::string data = m.content;
    if (m.method == 8) {  // one deflate block without compression
      const auto length = static_cast<U16>(data.size());
      data = '\x01' + bytes_of(length) + bytes_of(U16(~length)) + data;
    }
    const auto size = static_cast<U32>(m.content.size());
    const std::string common =
        bytes_of(U16{20}) + bytes_of(U16{0}) + bytes_of(m.method) +
        bytes_of(U16{0}) + bytes_of(U16{0x21}) + bytes_of(crc32(m.content)) +
        bytes_of(static_cast<U32>(data.size())) +
        bytes_of(m.claimed_size != 0 ? m.claimed_size : size) +
        bytes_of(static_cast<U16>(m.name.size())) + bytes_of(U16{0});
    const auto offset = static_cast<U32>(archive.size());
    archive += "PK\3\4" + common + m.name + data;
    directory += "PK\1\2" + bytes_of(U16{20}) + common + std::string(10, '\0') +
                 bytes_of(offset) + m.name;
  }
  const auto count = static_cast<U16>(members.size());
  return archive + directory + "PK\5\6" + bytes_of(U32{0}) + bytes_of(count) +
         bytes_of(count) + bytes_of(static_cast<U32>(directory.size())) +
         bytes_of(static_cast<U32>(archive.size())) + bytes_of(U16{0});
}

inline std::string npy_of(
    const std::string& descr,
    const std::string& shape,
    const std::string& data,
    bool fortran_order = false) {
  std::string dict = "{'descr': '" + descr + "', 'fortran_order': " +
                     (fortran_order ? "True" : "False") +
                     ", 'shape': " + shape + ", }";
  dict.resize(117, ' ');
  return std::string("\x93NUMPY\1\0v\0", 10) + dict + '\n' + data;
}

inline std::string layer_npy(std::size_t heads, std::size_t dim) {
  return npy_of(
      "<f4",
      "(" + std::to_string(heads) + ", " + std::to_string(dim) + ")",
      bytes_of_all(std::vector<float>(heads * dim, 0.5F)));
}

inline std::string meta_npy(const std::string& json) {
  std::string data;
  for (const char c : json)
    data += bytes_of(static_cast<char32_t>(c));
  return npy_of("<U" + std::to_string(json.size()), "()", data);
}

inline constexpr const char* kOneLayer = R"({"version": 1, "n_layers": 1})";

inline std::string npz_with_layer(const std::string& npy) {
  return zip_of({{"__meta__.npy", meta_npy(kOneLayer)}, {"layer_0.npy", npy}});
}

inline std::string npz_with_meta(const std::string& json) {
  return zip_of(
      {{"__meta__.npy", meta_npy(json)}, {"layer_0.npy", layer_npy(2, 3)}});
}

inline std::string safetensors_of(
    const std::string& header, const std::string& data) {
  return bytes_of(std::uint64_t{header.size()}) + header + data;
}

// [1, 2, 3] and its 24 bytes, with more entries of the header.
inline std::string safetensors_with(const std::string& entries) {
  return safetensors_of(
      "{" + entries +
          R"("q_filters":{"dtype":"F32","shape":[1,2,3],)"
          R"("data_offsets":[0,24]}})",
      bytes_of_all(std::vector<float>{1, -2, 3, -4, 5, -6}));
}

inline std::string gguf_text(const std::string& text) {
  return bytes_of(std::uint64_t{text.size()}) + text;
}

inline std::string gguf_field(
    const std::string& key, std::uint32_t type, const std::string& value) {
  return gguf_text(key) + bytes_of(type) + value;
}

inline std::string gguf_string(
    const std::string& key, const std::string& value) {
  return gguf_field(key, 8, gguf_text(value));
}

// What every filter file says.
inline std::vector<std::string> gguf_fields() {
  return {
      gguf_string("general.architecture", "qfilters"),
      gguf_field("qfilters.version", 4, bytes_of(std::uint32_t{1})),
      gguf_string("qfilters.sign", "positive")};
}

inline std::string gguf_tensor(
    const std::string& name,
    const std::vector<std::uint64_t>& dims,
    std::uint64_t offset,
    std::uint32_t type = 0) {
  return gguf_text(name) + bytes_of(static_cast<std::uint32_t>(dims.size())) +
         bytes_of_all(dims) + bytes_of(type) + bytes_of(offset);
}

inline std::string gguf_of(
    const std::vector<std::string>& fields,
    const std::vector<std::string>& tensors,
    const std::string& data,
    std::size_t alignment = 32) {
  std::string file = "GGUF" + bytes_of(std::uint32_t{3}) +
                     bytes_of(std::uint64_t{tensors.size()}) +
                     bytes_of(std::uint64_t{fields.size()});
  for (const std::string& field : fields)
    file += field;
  for (const std::string& tensor : tensors)
    file += tensor;
  file.resize((file.size() + alignment - 1) / alignment * alignment);
  return file + data;
}

// Four values and the rest of 32 bytes.
inline std::string gguf_data(std::vector<float> values) {
  values.resize(8);
  return bytes_of_all(values);
}

// [2, 2]: 1, -2, 3, -4, after more fields.
inline std::string gguf_with(const std::vector<std::string>& more) {
  std::vector<std::string> fields = gguf_fields();
  fields.insert(fields.end(), more.begin(), more.end());
  return gguf_of(
      fields,
      {gguf_tensor("blk.0.q_filter", {2, 2}, 0)},
      gguf_data({1, -2, 3, -4}));
}

inline FilterMetadata some_metadata() {
  FilterMetadata metadata;
  metadata.model_id = "org/m\u00f6del-7B \"q\" \U0001F600";
  metadata.model_fingerprint = "llama:30:3:64";
  metadata.query_site = "attention";
  metadata.dataset = "a book\\with\nlines";
  metadata.text_hash = "00ff00ff00ff00ff";
  metadata.n_samples = std::numeric_limits<std::uint64_t>::max();
  return metadata;
}

inline FilterBank some_filters() {
  using Limits = std::numeric_limits<float>;
  return {
      {{2, 3, {0.1F, -0.0F, Limits::max(), Limits::denorm_min(), 1, -1}},
       {2, 3, {0.0F, 7, 8, 9, Limits::lowest(), -Limits::min()}}},
      some_metadata()};
}

inline std::vector<std::uint32_t> bits_of(const LayerFilters& layer) {
  std::vector<std::uint32_t> bits;
  for (const float x : layer.values) {
    bits.push_back(std::bit_cast<std::uint32_t>(x));
  }
  return bits;
}

// A folder of its own, and how load_filters refuses what lies in it.
class FilterFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = ::testing::TempDir() + "qfilters_XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
  }

  void TearDown() override { std::filesystem::remove_all(folder_); }

  [[nodiscard]] std::filesystem::path write(
      const std::string& name, const std::string& content) const {
    std::ofstream(folder_ / name, std::ios::binary) << content;
    return folder_ / name;
  }

  static std::string read(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  // The message of the Error that `action` must throw.
  static std::string message_of(
      const std::function<void()>& action, ErrorKind kind = ErrorKind::kFile) {
    try {
      action();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), kind) << error.what();
      return error.what();
    }
    ADD_FAILURE() << "nothing was thrown";
    return "";
  }

  static std::string refusal_of(const std::filesystem::path& path) {
    std::string message =
        message_of([&] { static_cast<void>(load_filters(path)); });
    EXPECT_THAT(message, ::testing::HasSubstr(path.string()));
    return message;
  }

  std::string npz_refusal(const std::string& content) const {
    return refusal_of(write("f.npz", content));
  }

  std::string safetensors_refusal(const std::string& content) const {
    return refusal_of(write("f.safetensors", content));
  }

  std::string gguf_refusal(const std::string& content) const {
    return refusal_of(write("f.gguf", content));
  }

  std::filesystem::path folder_;
};

}  // namespace qfilters
