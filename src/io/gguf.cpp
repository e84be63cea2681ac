#include "io/gguf.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "io/input_file.h"
#include "io/sign.h"

namespace qfilters::io {
namespace {

constexpr std::string_view kMagic = "GGUF";
constexpr std::uint32_t kContainerVersion = 3;
constexpr std::uint64_t kFormatVersion = 1;
constexpr std::string_view kArchitecture = "qfilters";
constexpr std::uint64_t kAlignment = 32;  // what GGUF assumes without a key
constexpr std::uint64_t kMaxTextBytes = 65535;
constexpr std::uint64_t kMaxNameBytes = 63;
constexpr std::uint32_t kTensorF32 = 0;

// Types of metadata values, as GGUF numbers them.
enum Type : std::uint32_t {
  kUint32 = 4,
  kString = 8,
  kArray = 9,
  kUint64 = 10,
};

// What a file says besides its tensors.
struct Header {
  std::string architecture;
  std::string sign;
  std::uint64_t version = 0;
  std::uint64_t alignment = kAlignment;
  FilterMetadata metadata;
};

// A key that we write and read; the value is a text or a count.
struct Field {
  std::string_view key;
  Type type;
  std::string* text = nullptr;
  std::uint64_t* count = nullptr;
  bool seen = false;
};

std::vector<Field> fields_of(Header& header) {
  FilterMetadata& metadata = header.metadata;
  return {
      {"general.architecture", kString, &header.architecture},
      {"general.alignment", kUint32, nullptr, &header.alignment},
      {"qfilters.version", kUint32, nullptr, &header.version},
      {"qfilters.sign", kString, &header.sign},
      {"qfilters.model_id", kString, &metadata.model_id},
      {"qfilters.model_fingerprint", kString, &metadata.model_fingerprint},
      {"qfilters.query_site", kString, &metadata.query_site},
      {"qfilters.dataset", kString, &metadata.dataset},
      {"qfilters.text_hash", kString, &metadata.text_hash},
      {"qfilters.n_samples", kUint64, nullptr, &metadata.n_samples},
  };
}

std::string tensor_name(std::size_t layer) {
  return "blk." + std::to_string(layer) + ".q_filter";
}

// Bytes to the next multiple of the alignment.
std::uint64_t padding(std::uint64_t bytes, std::uint64_t alignment) {
  return (alignment - bytes % alignment) % alignment;
}

std::string read_text(InputFile& file, std::uint64_t max_bytes) {
  const auto bytes = file.get<std::uint64_t>();
  if (bytes > max_bytes) {
    fail(
        "it holds a text of " + std::to_string(bytes) + " bytes where " +
        std::to_string(max_bytes) + " are allowed");
  }
  return file.text(bytes);
}

// The same text, U+FFFD in place of bytes that are no UTF-8.
std::string as_utf8(const std::string& text) {
  using Json = nlohmann::json;
  const std::string quoted =
      Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
  return Json::parse(quoted).get<std::string>();
}

std::uint64_t scalar_bytes(std::uint32_t type) {
  constexpr std::array<std::uint8_t, 13> kBytes = {
      1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
  const std::uint64_t bytes = type < kBytes.size() ? kBytes[type] : 0;
  if (bytes == 0) {
    fail("it holds metadata of the unknown type " + std::to_string(type));
  }
  return bytes;
}

void skip_value(InputFile& file, std::uint32_t type) {
  if (type != kString && type != kArray) return file.skip(scalar_bytes(type));
  if (type == kString) return file.skip(file.get<std::uint64_t>());
  const auto element = file.get<std::uint32_t>();
  const auto count = file.get<std::uint64_t>();
  if (element == kString) {
    for (std::uint64_t i = 0; i < count; ++i) {
      file.skip(file.get<std::uint64_t>());
    }
    return;
  }
  if (element == kArray) fail("it holds an array of arrays");
  const std::uint64_t bytes = scalar_bytes(element);
  if (count > file.left() / bytes) {
    fail("it claims an array of " + std::to_string(count) + " values");
  }
  file.skip(count * bytes);
}

// Keys of others are skipped.
void read_fields(
    InputFile& file, std::uint64_t count, std::vector<Field> fields) {
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::string key = read_text(file, kMaxTextBytes);
    const auto type = file.get<std::uint32_t>();
    const auto field =
        std::find_if(fields.begin(), fields.end(), [&](const Field& candidate) {
          return candidate.key == key;
        });
    if (field == fields.end()) {
      skip_value(file, type);
      continue;
    }
    if (std::exchange(field->seen, true)) fail(key + " appears twice");
    if (type != field->type) {
      fail(
          key + " is of type " + std::to_string(type) + ", not " +
          std::to_string(field->type));
    }
    if (type == kString) {
      *field->text = read_text(file, kMaxTextBytes);
      // As GGUF wants it; no other format could hold it either.
      if (as_utf8(*field->text) != *field->text) fail(key + " is no UTF-8");
    }
    if (type == kUint32) *field->count = file.get<std::uint32_t>();
    if (type == kUint64) *field->count = file.get<std::uint64_t>();
  }
}

Header read_header(InputFile& file, std::uint64_t fields) {
  Header header;
  read_fields(file, fields, fields_of(header));
  if (header.architecture != kArchitecture) {
    fail(
        "its architecture is '" + header.architecture + "', not '" +
        std::string(kArchitecture) + "': no file of filters");
  }
  if (header.version != kFormatVersion) {
    fail(
        "qfilters.version " + std::to_string(header.version) + " is not " +
        std::to_string(kFormatVersion));
  }
  if (!std::has_single_bit(header.alignment)) {
    fail(
        "general.alignment " + std::to_string(header.alignment) +
        " is no power of two");
  }
  return header;
}

// A layer without its values, from the tensor's description up to its type.
LayerFilters read_shape(InputFile& file, std::size_t index) {
  const std::string expected = tensor_name(index);
  const std::string name = read_text(file, kMaxNameBytes);
  if (name != expected) {
    fail("it has a tensor '" + name + "' in place of '" + expected + "'");
  }
  const auto axes = file.get<std::uint32_t>();
  if (axes != 2) {
    fail(
        name + " has " + std::to_string(axes) +
        " axes instead of [dim, heads]");
  }
  LayerFilters layer;
  layer.dim = file.get<std::uint64_t>();
  layer.heads = file.get<std::uint64_t>();
  // Divide rather than multiply: the product of hostile sizes may overflow.
  const std::uint64_t max_values = file.size() / sizeof(float);
  if (layer.dim == 0 || layer.heads == 0 ||
      layer.heads > max_values / layer.dim) {
    fail(
        name + " of shape [" + std::to_string(layer.heads) + ", " +
        std::to_string(layer.dim) + "] does not fit in the file");
  }
  if (file.get<std::uint32_t>() != kTensorF32) fail(name + " is not F32");
  return layer;
}

// Tensors must follow each other without a gap, so that all of them together
// take no more than the file.
std::vector<LayerFilters> read_shapes(
    InputFile& file, std::uint64_t count, std::uint64_t alignment) {
  constexpr std::uint64_t kLeastBytes = 54;  // of one tensor's description
  if (count > file.left() / kLeastBytes) {
    fail(
        "it claims " + std::to_string(count) + " tensors in " +
        std::to_string(file.left()) + " bytes");
  }
  std::vector<LayerFilters> layers(count);
  std::uint64_t offset = 0;
  for (std::uint64_t l = 0; l < count; ++l) {
    layers[l] = read_shape(file, l);
    if (file.get<std::uint64_t>() != offset || offset > file.size()) {
      fail(
          tensor_name(l) + " does not begin at byte " + std::to_string(offset));
    }
    offset += layers[l].heads * layers[l].dim * sizeof(float);
    offset += padding(offset, alignment);
  }
  return layers;
}

template <typename T>
void put(std::string& out, T value) {
  const auto bytes = std::bit_cast<std::array<char, sizeof value>>(value);
  out.append(bytes.data(), bytes.size());
}

void put_text(std::string& out, std::string_view text) {
  if (text.size() > kMaxTextBytes) fail("its metadata is too long");
  put(out, std::uint64_t{text.size()});
  out += text;
}

void put_field(std::string& out, const Field& field) {
  put_text(out, field.key);
  put(out, std::uint32_t{field.type});
  if (field.type == kUint32) put(out, static_cast<std::uint32_t>(*field.count));
  if (field.type == kUint64) put(out, *field.count);
  if (field.type != kString) return;
  // Bytes that are no UTF-8, from a file's name say, must not cost the file.
  put_text(out, as_utf8(*field.text));
}

}  // namespace

FilterBank read_gguf(const std::filesystem::path& path) {
  InputFile file(path);
  if (file.text(std::min<std::uint64_t>(file.size(), 4)) != kMagic) {
    fail("it is no GGUF file");
  }
  const auto container = file.get<std::uint32_t>();
  if (container != kContainerVersion) {
    fail(
        "it is GGUF of version " + std::to_string(container) + ", not " +
        std::to_string(kContainerVersion) + " in little-endian order");
  }
  const auto tensors = file.get<std::uint64_t>();
  const auto fields = file.get<std::uint64_t>();
  Header header = read_header(file, fields);
  const FilterSign sign = parse_sign(header.sign);
  std::vector<LayerFilters> layers =
      read_shapes(file, tensors, header.alignment);

  file.skip(padding(file.size() - file.left(), header.alignment));
  for (LayerFilters& layer : layers) {
    const std::uint64_t count = layer.heads * layer.dim;
    if (count > file.left() / sizeof(float)) fail("it is truncated");
    layer.values.resize(count);
    file.read(layer.values.data(), count * sizeof(float));
    file.skip(padding(count * sizeof(float), header.alignment));
    apply_sign(sign, layer.values);
  }
  if (file.left() != 0) {
    fail(std::to_string(file.left()) + " bytes follow its last tensor");
  }
  return {std::move(layers), std::move(header.metadata)};
}

std::string encode_gguf(const FilterBank& filters, FilterSign sign) {
  Header header;
  header.architecture = kArchitecture;
  header.sign = sign_name(sign);
  header.version = kFormatVersion;
  header.metadata = filters.metadata();
  const std::vector<Field> fields = fields_of(header);

  std::string out(kMagic);
  put(out, kContainerVersion);
  put(out, std::uint64_t{filters.layers()});
  put(out, std::uint64_t{fields.size()});
  for (const Field& field : fields) {
    put_field(out, field);
  }
  std::uint64_t offset = 0;
  for (std::size_t l = 0; l < filters.layers(); ++l) {
    const LayerFilters& layer = filters.layer(l);
    put_text(out, tensor_name(l));
    put(out, std::uint32_t{2});  // axes
    put(out, std::uint64_t{layer.dim});
    put(out, std::uint64_t{layer.heads});
    put(out, kTensorF32);
    put(out, offset);
    offset += layer.values.size() * sizeof(float);
    offset += padding(offset, kAlignment);
  }
  out.append(padding(out.size(), kAlignment), '\0');
  for (std::size_t l = 0; l < filters.layers(); ++l) {
    std::vector<float> values = filters.layer(l).values;
    apply_sign(sign, values);
    out.append(
        reinterpret_cast<const char*>(values.data()),
        values.size() * sizeof(float));
    out.append(padding(out.size(), kAlignment), '\0');
  }
  return out;
}

}  // namespace qfilters::io
