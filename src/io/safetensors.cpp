#include "io/safetensors.h"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "qfilters/error.h"

#include "io/input_file.h"
#include "io/sign.h"

namespace qfilters::io {
namespace {

using Json = nlohmann::json;

// A header is a few hundred bytes; these stop a hostile one from making the
// reader allocate far more than the file holds.
constexpr std::uint64_t kMaxHeaderBytes = 32768;
constexpr std::uint64_t kMaxLayers = 4096;
constexpr std::uint64_t kLengthBytes = 8;
constexpr const char* kTensor = "q_filters";
constexpr const char* kMetadata = "__metadata__";
constexpr const char* kSign = "sign";

Json read_header(InputFile& file) {
  if (file.left() < kLengthBytes) fail("it is too short for safetensors");
  const auto length = file.get<std::uint64_t>();
  if (length > file.left()) {
    fail(
        "it is no safetensors file or truncated: a header of " +
        std::to_string(length) + " bytes in a file of " +
        std::to_string(file.size()));
  }
  if (length > kMaxHeaderBytes) {
    fail(
        "its header of " + std::to_string(length) + " bytes exceeds " +
        std::to_string(kMaxHeaderBytes));
  }
  Json header = Json::parse(file.text(length), nullptr, /*exceptions=*/false);
  if (!header.is_object()) fail("its header is no JSON object");
  return header;
}

std::vector<std::uint64_t> unsigned_array(
    const Json& tensor, const char* key, std::size_t size) {
  const auto found = tensor.find(key);
  std::vector<std::uint64_t> values;
  if (found != tensor.end() && found->is_array()) {
    for (const Json& value : *found) {
      if (value.is_number_unsigned()) values.push_back(value);
    }
  }
  if (values.size() != size || found->size() != size) {
    fail(
        std::string("a tensor's ") + key + " is not an array of " +
        std::to_string(size) + " sizes");
  }
  return values;
}

// The bytes of one tensor, relative to the end of the header.
struct Extent {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

Extent extent_of(const Json& tensor) {
  if (!tensor.is_object()) fail("a tensor's header is no JSON object");
  const auto offsets = unsigned_array(tensor, "data_offsets", 2);
  if (offsets[0] > offsets[1]) fail("a tensor ends before it begins");
  return {offsets[0], offsets[1]};
}

// All tensors together must reach exactly to the end of the file.
void check_extents(const Json& header, std::uint64_t data_bytes) {
  std::uint64_t end = 0;
  for (const auto& [name, tensor] : header.items()) {
    if (name != kMetadata) end = std::max(end, extent_of(tensor).end);
  }
  if (end != data_bytes) {
    fail(
        "its tensors take " + std::to_string(end) + " bytes, the file holds " +
        std::to_string(data_bytes));
  }
}

struct Shape {
  std::uint64_t layers = 0;
  std::uint64_t heads = 0;
  std::uint64_t dim = 0;
};

Shape checked_shape(const Json& tensor, const Extent& extent) {
  const auto dtype = tensor.find("dtype");
  if (dtype == tensor.end() || *dtype != "F32") {
    fail(std::string("tensor ") + kTensor + " is not of dtype F32");
  }
  const auto sizes = unsigned_array(tensor, "shape", 3);
  const std::uint64_t elements = (extent.end - extent.begin) / sizeof(float);
  // Divide rather than multiply: the product of hostile sizes may overflow.
  std::uint64_t left = elements;
  for (const std::uint64_t size : sizes) {
    if (size == 0 || left % size != 0) left = 0;
    if (left != 0) left /= size;
  }
  if (left != 1 || (extent.end - extent.begin) % sizeof(float) != 0) {
    fail(
        std::string("tensor ") + kTensor + " of shape [" +
        std::to_string(sizes[0]) + ", " + std::to_string(sizes[1]) + ", " +
        std::to_string(sizes[2]) + "] does not take " +
        std::to_string(extent.end - extent.begin) + " bytes");
  }
  if (sizes[0] > kMaxLayers) {
    fail("it has " + std::to_string(sizes[0]) + " layers");
  }
  return {sizes[0], sizes[1], sizes[2]};
}

// Returns `key` of the string map, or "" where another tool wrote the file.
std::string text_of(const Json& metadata, const char* key) {
  const auto found = metadata.find(key);
  if (found == metadata.end()) return "";
  if (!found->is_string()) {
    fail(std::string(kMetadata) + "'s " + key + " is no string");
  }
  return found->get<std::string>();
}

std::uint64_t parse_count(const std::string& text) {
  std::uint64_t count = 0;
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, count);
  if (result.ec != std::errc{} || result.ptr != end) {
    fail("n_samples is '" + text + "'");
  }
  return count;
}

FilterMetadata read_metadata(const Json& map) {
  FilterMetadata metadata;
  metadata.model_id = text_of(map, "model_id");
  metadata.model_fingerprint = text_of(map, "model_fingerprint");
  metadata.query_site = text_of(map, "query_site");
  metadata.dataset = text_of(map, "dataset");
  metadata.text_hash = text_of(map, "text_hash");
  const std::string n_samples = text_of(map, "n_samples");
  if (!n_samples.empty()) metadata.n_samples = parse_count(n_samples);
  return metadata;
}

// Published files carry no sign and are negated.
FilterSign sign_of(const Json& map) {
  const std::string sign = text_of(map, kSign);
  return sign.empty() ? FilterSign::kNegated : parse_sign(sign);
}

}  // namespace

FilterBank read_safetensors(const std::filesystem::path& path) {
  InputFile file(path);
  const Json header = read_header(file);
  check_extents(header, file.left());

  const auto tensor = header.find(kTensor);
  if (tensor == header.end()) fail(std::string("it has no tensor ") + kTensor);
  const Extent extent = extent_of(*tensor);
  const Shape shape = checked_shape(*tensor, extent);
  const Json map = header.value(kMetadata, Json::object());
  if (!map.is_object()) fail(std::string(kMetadata) + " is no JSON object");
  const FilterSign sign = sign_of(map);

  file.skip(extent.begin);
  std::vector<LayerFilters> layers;
  for (std::uint64_t l = 0; l < shape.layers; ++l) {
    std::vector<float> values(shape.heads * shape.dim);
    file.read(values.data(), values.size() * sizeof(float));
    apply_sign(sign, values);
    layers.push_back({shape.heads, shape.dim, std::move(values)});
  }
  return {std::move(layers), read_metadata(map)};
}

std::string encode_safetensors(const FilterBank& filters, FilterSign sign) {
  const LayerFilters& first = filters.layer(0);
  for (std::size_t l = 1; l < filters.layers(); ++l) {
    const LayerFilters& layer = filters.layer(l);
    if (layer.heads == first.heads && layer.dim == first.dim) continue;
    throw Error(
        ErrorKind::kShape,
        "safetensors holds layers of one shape, but layer 0 is [" +
            std::to_string(first.heads) + ", " + std::to_string(first.dim) +
            "] and layer " + std::to_string(l) + " is [" +
            std::to_string(layer.heads) + ", " + std::to_string(layer.dim) +
            "]");
  }
  const FilterMetadata& metadata = filters.metadata();
  const std::size_t layer_bytes = first.values.size() * sizeof(float);
  const Json header = {
      {kMetadata,
       {{"version", "1"},
        {kSign, sign_name(sign)},
        {"model_id", metadata.model_id},
        {"model_fingerprint", metadata.model_fingerprint},
        {"query_site", metadata.query_site},
        {"dataset", metadata.dataset},
        {"text_hash", metadata.text_hash},
        {"n_samples", std::to_string(metadata.n_samples)}}},
      {kTensor,
       {{"dtype", "F32"},
        {"shape", {filters.layers(), first.heads, first.dim}},
        {"data_offsets", {0, filters.layers() * layer_bytes}}}}};
  // Bytes that are no UTF-8, from a file's name say, must not cost the file.
  std::string text =
      header.dump(-1, ' ', false, Json::error_handler_t::replace);
  text.resize((text.size() + 7) / 8 * 8, ' ');
  if (text.size() > kMaxHeaderBytes) fail("its metadata is too long");

  const std::uint64_t length = text.size();
  std::string content(kLengthBytes, '\0');
  std::memcpy(content.data(), &length, kLengthBytes);
  content += text;
  for (std::size_t l = 0; l < filters.layers(); ++l) {
    std::vector<float> values = filters.layer(l).values;
    apply_sign(sign, values);
    content.append(
        reinterpret_cast<const char*>(values.data()),
        values.size() * sizeof(float));
  }
  return content;
}

}  // namespace qfilters::io
