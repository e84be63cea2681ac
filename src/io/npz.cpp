#include "io/npz.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>
#include <zip.h>

#include "qfilters/error.h"

#include "io/input_file.h"
#include "io/npy.h"

namespace qfilters::io {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kMaxMetaCharacters = 32768;
constexpr std::uint64_t kMaxNpyHeaderBytes = 4096;
// Deflated members may claim any size. Filters hardly compress, and one byte
// becomes one float32 at most; small files may hold constants.
constexpr std::uint64_t kMaxGrowth = 4;
constexpr std::uint64_t kAlwaysAllowedBytes = 1U << 20;

// Calls a C function of libzip on what a unique_ptr holds.
template <auto Function>
struct Release {
  void operator()(auto* handle) const noexcept { Function(handle); }
};

using Zip = std::unique_ptr<zip_t, Release<zip_discard>>;
using ZipFile = std::unique_ptr<zip_file_t, Release<zip_fclose>>;
using ZipSource = std::unique_ptr<zip_source_t, Release<zip_source_free>>;

std::uint64_t little_endian(const char* bytes, std::size_t size) {
  std::uint64_t value = 0;
  std::memcpy(&value, bytes, size);
  return value;
}

// libzip allocates what the directory at the end of the file claims, before
// it reads it. An honest directory is small beside the filters.
void check_directory(InputFile file) {
  constexpr std::uint64_t kTailBytes = 67584;  // more than libzip searches
  constexpr std::uint64_t kAlwaysAllowedDirectory = 65536;
  constexpr std::size_t kEndBytes = 22;
  constexpr std::size_t kLocatorBytes = 20;
  const std::uint64_t tail_bytes = std::min(file.size(), kTailBytes);
  file.skip(file.size() - tail_bytes);
  const std::string tail = file.text(tail_bytes);
  for (std::size_t at = tail.find("PK\5\6");
       at != std::string::npos && at + kEndBytes <= tail.size();
       at = tail.find("PK\5\6", at + 1)) {
    if (at >= kLocatorBytes &&
        tail.compare(at - kLocatorBytes, 4, "PK\6\7") == 0) {
      fail("it is a zip64 archive, far too large for filters");
    }
    const std::uint64_t size = little_endian(tail.data() + at + 12, 4);
    const std::uint64_t offset = little_endian(tail.data() + at + 16, 4);
    const std::uint64_t end = file.size() - tail_bytes + at;
    if (size > std::max(file.size() / 6, kAlwaysAllowedDirectory) &&
        offset + size <= end) {
      fail("its zip directory is far too large for filters");
    }
  }
}

class Archive {
 public:
  explicit Archive(const std::filesystem::path& path) {
    InputFile file(path);
    bytes_ = file.size();
    check_directory(std::move(file));
    int code = 0;
    archive_.reset(zip_open(path.c_str(), ZIP_RDONLY, &code));
    if (archive_ != nullptr) return;
    zip_error_t reason;
    zip_error_init_with_code(&reason, code);
    const std::string text = zip_error_strerror(&reason);
    zip_error_fini(&reason);
    fail("it is no zip archive or damaged: " + text);
  }

  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

  [[nodiscard]] std::uint64_t members() const noexcept {
    return static_cast<std::uint64_t>(
        zip_get_num_entries(archive_.get(), ZIP_FL_UNCHANGED));
  }

  /// Opens a member; `stat` receives its claimed sizes. Several directory
  /// entries may share the same bytes, so those opened are added up.
  ZipFile open(const std::string& name, zip_stat_t& stat) {
    const zip_int64_t index =
        zip_name_locate(archive_.get(), name.c_str(), ZIP_FL_ENC_RAW);
    if (index < 0) fail("it has no member " + name);
    const auto entry = static_cast<zip_uint64_t>(index);
    if (zip_stat_index(archive_.get(), entry, 0, &stat) != 0 ||
        stat.encryption_method != ZIP_EM_NONE ||
        (stat.comp_method != ZIP_CM_STORE &&
         stat.comp_method != ZIP_CM_DEFLATE)) {
      fail("member " + name + " is neither stored nor deflated");
    }
    const bool stored = stat.comp_method == ZIP_CM_STORE;
    if (stat.comp_size > bytes_ - used_ ||
        (stored && stat.size != stat.comp_size)) {
      fail("member " + name + " claims more bytes than the file holds");
    }
    used_ += stat.comp_size;
    ZipFile file(zip_fopen_index(archive_.get(), entry, 0));
    if (file == nullptr) fail(zip_strerror(archive_.get()));
    return file;
  }

 private:
  Zip archive_;
  std::uint64_t bytes_ = 0;
  std::uint64_t used_ = 0;
};

// Reads one member as a stream, so that no second copy of it is held.
class NpyMember {
 public:
  NpyMember(Archive& archive, const std::string& name)
      : name_(name), file_(archive.open(name, stat_)) {
    std::string start(10, '\0');
    read(start.data(), start.size());
    if (start.compare(0, 6, "\x93NUMPY") != 0 || start[6] < 1 || start[6] > 3) {
      fail("member " + name_ + " is not .npy of version 1, 2 or 3");
    }
    const std::size_t length_bytes = start[6] == 1 ? 2 : 4;
    start.resize(8 + length_bytes);
    read(start.data() + 10, length_bytes - 2);
    const std::uint64_t length = little_endian(&start[8], length_bytes);
    if (length > kMaxNpyHeaderBytes || length + start.size() > stat_.size) {
      fail("member " + name_ + " has a damaged .npy header");
    }
    std::string text(length, '\0');
    read(text.data(), text.size());
    header_ = parse_npy_header(text);
    data_bytes_ = stat_.size - start.size() - text.size();
  }

  [[nodiscard]] const NpyHeader& header() const noexcept { return header_; }

  [[nodiscard]] std::uint64_t data_bytes() const noexcept {
    return data_bytes_;
  }

  [[noreturn]] void fail_with(const std::string& reason) const {
    fail("member " + name_ + " " + reason);
  }

  void read(char* to, std::size_t bytes) {
    while (bytes > 0) {
      const zip_int64_t got = zip_fread(file_.get(), to, bytes);
      if (got == 0) fail_with("ends too early");
      if (got < 0) fail_with(zip_file_strerror(file_.get()));
      to += got;
      bytes -= static_cast<std::size_t>(got);
    }
  }

  // Reading up to the end is what makes libzip compare the checksum.
  void finish() {
    char byte = 0;
    if (zip_fread(file_.get(), &byte, 1) != 0) fail_with("is damaged");
  }

 private:
  std::string name_;
  zip_stat_t stat_ = {};
  ZipFile file_;
  NpyHeader header_;
  std::uint64_t data_bytes_ = 0;
};

std::string layer_name(std::size_t index) {
  return "layer_" + std::to_string(index) + ".npy";
}

LayerFilters read_layer(
    Archive& archive, std::size_t index, std::uint64_t max_values) {
  NpyMember member(archive, layer_name(index));
  const NpyHeader& header = member.header();
  const std::optional<NpyType> type = npy_number(header.descr);
  if (!type) {
    member.fail_with(
        "is of type '" + header.descr +
        "', not float16 to 64, an integer or bool");
  }
  if (header.shape.size() != 2) {
    member.fail_with(
        "has " + std::to_string(header.shape.size()) +
        " axes instead of [heads, dim]");
  }
  const std::uint64_t heads = header.shape[0];
  const std::uint64_t dim = header.shape[1];
  // Divide rather than multiply: the product of hostile sizes may overflow.
  const std::uint64_t count = member.data_bytes() / type->size;
  if (heads == 0 || dim == 0 || count % dim != 0 || count / dim != heads ||
      member.data_bytes() % type->size != 0) {
    member.fail_with(
        "of shape [" + std::to_string(heads) + ", " + std::to_string(dim) +
        "] does not take " + std::to_string(member.data_bytes()) + " bytes");
  }
  if (count > max_values) {
    member.fail_with("claims far more bytes than the file can hold");
  }
  LayerFilters layer{heads, dim, std::vector<float>(count)};
  std::array<char, 8192> bytes = {};
  std::array<float, bytes.size() / sizeof(double)> values = {};
  for (std::uint64_t i = 0; i < count;) {
    const std::uint64_t n = std::min(count - i, values.size());
    member.read(bytes.data(), n * type->size);
    decode_npy(*type, bytes, std::span(values).first(n));
    for (std::uint64_t j = 0; j < n; ++j, ++i) {
      const std::uint64_t at =
          header.fortran_order ? i % heads * dim + i / heads : i;
      layer.values[at] = values[j];
    }
  }
  member.finish();
  return layer;
}

// A 0-d array of one UTF-32 text, padded with zeros.
Json read_meta(Archive& archive) {
  NpyMember member(archive, "__meta__.npy");
  const std::string& type = member.header().descr;
  const std::uint64_t characters = member.data_bytes() / 4;
  if (type.size() < 2 || (type[0] != '<' && type[0] != '>') ||
      type.substr(1) != "U" + std::to_string(characters) ||
      !member.header().shape.empty() || member.data_bytes() % 4 != 0) {
    member.fail_with("is not one text");
  }
  if (characters > kMaxMetaCharacters) {
    member.fail_with("is longer than " + std::to_string(kMaxMetaCharacters));
  }
  std::u32string text(characters, U'\0');
  for (char32_t& character : text) {
    std::array<char, 4> bytes = {};
    member.read(bytes.data(), bytes.size());
    if (type[0] == '>') std::reverse(bytes.begin(), bytes.end());
    std::memcpy(&character, bytes.data(), bytes.size());
  }
  text.resize(text.find_last_not_of(U'\0') + 1);
  member.finish();
  Json meta = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!meta.is_object()) member.fail_with("is no JSON object");
  return meta;
}

std::string text_of(const Json& meta, const char* key) {
  const auto found = meta.find(key);
  if (found == meta.end()) return "";
  if (!found->is_string()) fail(std::string(key) + " in __meta__ is no string");
  return found->get<std::string>();
}

// The reference converts with int(), so "1" and 1.0 count as 1.
std::uint64_t count_of(const Json& meta, const char* key) {
  const auto found = meta.find(key);
  if (found == meta.end()) fail(std::string("__meta__ has no ") + key);
  if (found->is_number_unsigned()) return found->get<std::uint64_t>();
  if (found->is_number_float()) {
    const auto value = found->get<double>();
    if (value >= 0.0 && value < 0x1p53) {
      return static_cast<std::uint64_t>(value);
    }
  }
  if (found->is_string()) {
    const auto& text = found->get_ref<const std::string&>();
    const char* end = text.data() + text.size();
    std::uint64_t value = 0;
    const auto result = std::from_chars(text.data(), end, value);
    if (result.ec == std::errc{} && result.ptr == end) return value;
  }
  fail(std::string(key) + " in __meta__ is no count");
}

// What __meta__ says.
struct Meta {
  std::uint64_t n_layers = 0;
  FilterMetadata metadata;
};

Meta parse_meta(const Json& json) {
  if (count_of(json, "version") != 1) {
    fail("version " + json["version"].dump() + " is not 1; calibrate again");
  }
  Meta meta;
  meta.n_layers = count_of(json, "n_layers");
  meta.metadata.model_id = text_of(json, "model_id");
  meta.metadata.model_fingerprint = text_of(json, "model_fingerprint");
  meta.metadata.query_site = text_of(json, "query_site");
  meta.metadata.dataset = text_of(json, "dataset");
  meta.metadata.text_hash = text_of(json, "text_hash");
  if (json.contains("n_samples")) {
    meta.metadata.n_samples = count_of(json, "n_samples");
  }
  return meta;
}

std::string encode_meta(const FilterBank& filters) {
  const FilterMetadata& metadata = filters.metadata();
  // Bytes that are no UTF-8, from a file's name say, must not cost the file.
  const auto quote = [](const std::string& text) {
    return Json(text).dump(-1, ' ', true, Json::error_handler_t::replace);
  };
  const std::string json =
      "{\"version\": 1, \"model_id\": " + quote(metadata.model_id) +
      ", \"n_layers\": " + std::to_string(filters.layers()) +
      ", \"n_samples\": " + std::to_string(metadata.n_samples) +
      ", \"dataset\": " + quote(metadata.dataset) +
      ", \"model_fingerprint\": " + quote(metadata.model_fingerprint) +
      ", \"query_site\": " + quote(metadata.query_site) +
      ", \"text_hash\": " + quote(metadata.text_hash) + "}";
  if (json.size() > kMaxMetaCharacters) fail("its metadata is too long");
  std::string npy = npy_header("<U" + std::to_string(json.size()), "()");
  for (const char c : json) {
    npy += {c, '\0', '\0', '\0'};
  }
  return npy;
}

std::string encode_layer(const LayerFilters& layer) {
  std::string npy = npy_header(
      "<f4",
      "(" + std::to_string(layer.heads) + ", " + std::to_string(layer.dim) +
          ")");
  const std::size_t start = npy.size();
  npy.resize(start + layer.values.size() * sizeof(float));
  std::memcpy(&npy[start], layer.values.data(), npy.size() - start);
  return npy;
}

struct Member {
  std::string name;
  std::string content;
};

void add_member(zip_t* archive, const Member& member) {
  ZipSource source(zip_source_buffer(
      archive, member.content.data(), member.content.size(), 0));
  const zip_int64_t index =
      zip_file_add(archive, member.name.c_str(), source.get(), 0);
  if (index < 0) fail(zip_strerror(archive));
  static_cast<void>(source.release());  // the archive owns it now
  const auto entry = static_cast<zip_uint64_t>(index);
  // The date that numpy writes, 1980-01-01: equal filters, equal bytes.
  constexpr zip_uint16_t kDate = 0x21;
  if (zip_set_file_compression(archive, entry, ZIP_CM_STORE, 0) != 0 ||
      zip_file_set_dostime(archive, entry, 0, kDate, 0) != 0) {
    fail(zip_strerror(archive));
  }
}

std::string write_archive(const std::vector<Member>& members) {
  ZipSource target(zip_source_buffer_create(nullptr, 0, 0, nullptr));
  Zip archive(zip_open_from_source(target.get(), ZIP_TRUNCATE, nullptr));
  if (archive == nullptr) fail("libzip cannot start an archive");
  zip_source_keep(target.get());  // it outlives the archive
  for (const Member& member : members) {
    add_member(archive.get(), member);
  }
  if (zip_close(archive.get()) != 0) fail(zip_strerror(archive.get()));
  static_cast<void>(archive.release());  // closing freed it

  zip_stat_t stat = {};
  std::string content;
  if (zip_source_open(target.get()) == 0 &&
      zip_source_stat(target.get(), &stat) == 0) {
    content.resize(stat.size);
    const zip_int64_t got =
        zip_source_read(target.get(), content.data(), content.size());
    zip_source_close(target.get());
    if (got == static_cast<zip_int64_t>(content.size())) return content;
  }
  fail("libzip cannot read its own archive");
}

}  // namespace

FilterBank read_npz(const std::filesystem::path& path) {
  Archive archive(path);
  Meta meta = parse_meta(read_meta(archive));
  if (meta.n_layers > archive.members()) {
    fail(
        "it claims " + std::to_string(meta.n_layers) + " layers in " +
        std::to_string(archive.members()) + " members");
  }
  std::uint64_t max_values =
      std::max(archive.bytes() * kMaxGrowth, kAlwaysAllowedBytes) /
      sizeof(float);
  std::vector<LayerFilters> layers;
  for (std::uint64_t l = 0; l < meta.n_layers; ++l) {
    layers.push_back(read_layer(archive, l, max_values));
    max_values -= layers.back().values.size();
  }
  return {std::move(layers), std::move(meta.metadata)};
}

std::string encode_npz(const FilterBank& filters, FilterSign sign) {
  if (sign != FilterSign::kPositive) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "npz has no place for the sign: its filters are always positive");
  }
  std::vector<Member> members = {{"__meta__.npy", encode_meta(filters)}};
  for (std::size_t l = 0; l < filters.layers(); ++l) {
    members.push_back({layer_name(l), encode_layer(filters.layer(l))});
  }
  return write_archive(members);
}

}  // namespace qfilters::io
