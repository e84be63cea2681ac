#include "conformance/golden_set.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <fstream>
#include <utility>

#include <zlib.h>

namespace qfilters::golden {

GoldenSet::GoldenSet(std::filesystem::path folder)
    : folder_(std::move(folder)) {
  const std::filesystem::path path = folder_ / "manifest.json";
  std::ifstream file(path);
  if (!file) throw BadFolder(path.string() + " is missing");
  const Json manifest = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!manifest.is_object() || !manifest.contains("groups") ||
      !manifest["groups"].is_object()) {
    throw BadFolder(path.string() + " is no manifest of golden vectors");
  }
  groups_ = manifest["groups"];
}

const Json& GoldenSet::cases(const std::string& group) const {
  return groups_.at(group).at("cases");
}

const NpzArrays& GoldenSet::file(const std::string& name) const {
  const auto found = files_.find(name);
  if (found != files_.end()) return found->second;
  return files_.emplace(name, NpzArrays(folder_ / name)).first->second;
}

const NpzArrays& GoldenSet::arrays(const std::string& group) const {
  return file(groups_.at(group).at("file").get<std::string>());
}

const NpzArrays& GoldenSet::pools() const {
  return file("pools.npz");
}

Stream::Stream(
    DType dtype,
    std::size_t batch,
    std::size_t heads,
    std::size_t tokens,
    std::size_t dim)
    : dtype_(dtype), batch_(batch), heads_(heads), tokens_(tokens), dim_(dim) {
  const std::size_t size = batch * heads * tokens * dim;
  if (dtype == DType::kFloat32) {
    floats_.reserve(size);
  } else {
    halves_.reserve(size);
  }
}

Stream::Stream(DType dtype, const Array& array)
    : Stream(
          dtype,
          array.shape.size() == 4 ? array.shape[0] : 1,
          array.shape.size() < 3 ? 1 : array.shape[array.shape.size() - 3],
          array.shape.size() < 2 ? 1 : array.shape[array.shape.size() - 2],
          array.shape.empty() ? 1 : array.shape.back()) {
  if (dtype == DType::kFloat32) {
    floats_ = array.all<float>();
  } else {
    halves_ = array.all<std::uint16_t>();
  }
}

void Stream::push(float value) {
  if (dtype_ == DType::kFloat32) {
    floats_.push_back(value);
  } else {
    halves_.push_back(
        dtype_ == DType::kFloat16 ? to_half(value) : to_bfloat(value));
  }
}

TensorView Stream::slice(std::size_t first, std::size_t count) const {
  if (first > tokens_ || count > tokens_ - first) {
    throw BadFolder("a case has more updates than tokens");
  }
  const void* data = halves_.data();
  if (dtype_ == DType::kFloat32) data = floats_.data();
  TensorView view =
      TensorView::dense(data, dtype_, batch_, heads_, tokens_, dim_);
  view.data = view.row(0, 0, first);
  view.tokens = count;
  return view;
}

float Stream::at(
    std::size_t b, std::size_t h, std::size_t t, std::size_t d) const {
  const std::size_t i = ((b * heads_ + h) * tokens_ + t) * dim_ + d;
  if (dtype_ == DType::kFloat32) return floats_[i];
  if (dtype_ == DType::kFloat16) {
    return static_cast<float>(from_half(halves_[i]));
  }
  return std::bit_cast<float>(static_cast<std::uint32_t>(halves_[i]) << 16U);
}

std::uint16_t to_half(float value) {
  const unsigned sign = std::signbit(value) ? 0x8000U : 0U;
  const double size = std::fabs(static_cast<double>(value));
  if (std::isnan(value)) return static_cast<std::uint16_t>(sign | 0x7E00U);
  if (size == 0) return static_cast<std::uint16_t>(sign);
  if (size >= 65520) return static_cast<std::uint16_t>(sign | 0x7C00U);
  int exponent = 0;
  std::frexp(size, &exponent);
  exponent = std::max(exponent - 1, -14);
  const double steps = std::nearbyint(std::ldexp(size, 10 - exponent));
  // A carry into the exponent and subnormals come out right by themselves.
  const int bits = exponent * 1024 + 14 * 1024 + static_cast<int>(steps);
  return static_cast<std::uint16_t>(sign | static_cast<unsigned>(bits));
}

std::uint16_t to_bfloat(float value) {
  if (std::isnan(value)) return 0x7FC0U;
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rest = bits & 0xFFFFU;
  const std::uint32_t up =
      rest > 0x8000U || (rest == 0x8000U && (bits & 0x10000U) != 0) ? 1 : 0;
  return static_cast<std::uint16_t>((bits >> 16U) + up);
}

DType dtype_of(const std::string& name) {
  for (const DType dtype :
       {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    if (name == to_string(dtype)) return dtype;
  }
  throw BadFolder("the manifest names the type '" + name + "'");
}

namespace {

std::string at_dim(const std::string& pool, std::size_t dim) {
  return pool + "_D" + std::to_string(dim);
}

}  // namespace

Stream selection_keys(const GoldenSet& set, const Source& from) {
  const std::map<std::string, std::pair<std::string, float>> pools = {
      {"normal", {"normal", 1.0F}},
      {"iso", {"normal", 1.0F}},
      {"grid", {"grid_i8", 0.0625F}},
      {"ties", {"ties_i8", 1.0F}},
      {"const", {"const", 1.0F}}};
  const auto found = pools.find(from.kind);
  if (found == pools.end()) throw BadFolder("unknown kind " + from.kind);
  const float scale = found->second.second;
  const Array& pool = set.pools()[at_dim(found->second.first, from.dim)];
  const std::size_t rows = pool.values.size() / from.dim;  // 1 for "const"
  if (rows == 0) throw BadFolder("a pool of keys is empty");
  return {
      from.dtype,
      from.batch,
      from.heads,
      from.tokens,
      from.dim,
      [&](std::size_t b, std::size_t h, std::size_t t, std::size_t d) {
        const std::size_t row =
            (from.row0 + t + 61 * (b * from.heads + h)) % rows;
        return static_cast<float>(pool.values[row * from.dim + d]) * scale;
      }};
}

Stream fallback_keys(const GoldenSet& set, const Source& from) {
  if (from.kind == "iso") return selection_keys(set, from);
  const bool constant = from.kind == "const";
  const bool repeated = from.kind == "duprows";
  if (!constant && !repeated && from.kind != "aniso") {
    throw BadFolder("unknown kind " + from.kind);
  }
  static const Array none;
  const Array& pool = constant ? none : set.pools()[at_dim("aniso", from.dim)];
  if (!constant && pool.shape != std::vector<std::size_t>{4, 288, from.dim}) {
    throw BadFolder("pool aniso is not [4, 288, D]");
  }
  return {
      from.dtype,
      from.batch,
      from.heads,
      from.tokens,
      from.dim,
      [&](std::size_t b, std::size_t h, std::size_t t, std::size_t d) {
        if (constant) return 0.5F;
        const std::size_t step = repeated ? (3 * t * t + t) % 12 : t;
        const std::size_t row = (from.row0 + step + 17 * b) % 288;
        return static_cast<float>(
            pool.values[((b + h) % 4 * 288 + row) * from.dim + d]);
      }};
}

Stream values_for(const Source& from) {
  return {
      from.dtype,
      from.batch,
      from.heads,
      from.tokens,
      from.dim,
      [&](std::size_t b, std::size_t h, std::size_t t, std::size_t d) {
        const std::size_t head = b * from.heads + h;
        if (d == 0) return static_cast<float>(t % 128);
        const std::size_t block = t / 128;
        if (d == 1) return static_cast<float>(block);
        if (d == 2) return static_cast<float>(b);
        if (d == 3) return static_cast<float>(h);
        return static_cast<float>((7 * t + 3 * d + 5 * head) % 61) - 30.0F;
      }};
}

LayerFilters pool_filters(
    const GoldenSet& set,
    const std::string& kind,
    std::size_t heads,
    std::size_t dim) {
  const std::string pool = "filt_" + (kind == "const" ? "grid" : kind);
  return {
      heads, dim, set.pools()[at_dim(pool, dim)].slice<float>(0, heads * dim)};
}

Config config_of(const Json& golden) {
  Config config;
  config.qfilters_budget = golden.at("budget");
  config.qfilters_n_sink = golden.at("n_sink");
  config.qfilters_recent = golden.value("recent", 0);
  config.qfilters_sign = golden.value("sign", 1);
  config.qfilters_calib_tokens =
      golden.value("calib_tokens", config.qfilters_calib_tokens);
  config.qfilters_on_low_retention = "ignore";
  return config;
}

namespace {

std::uint32_t crc(std::uint32_t before, const void* data, std::size_t bytes) {
  return static_cast<std::uint32_t>(
      crc32_z(before, static_cast<const Bytef*>(data), bytes));
}

}  // namespace

std::uint32_t crc_of(const RowsView& view, Rows which) {
  const RowShape& shape = view.shape();
  const bool keys = which == Rows::kKeys;
  std::vector<std::uint16_t> row(keys ? shape.key_dim : shape.value_dim);
  std::uint32_t sum = 0;
  for (std::size_t g = 0; g < shape.groups(); ++g) {
    for (std::size_t r = 0; r < view.rows(g); ++r) {
      if (keys) {
        view.read_key(g, r, row.data());
      } else {
        view.read_value(g, r, row.data());
      }
      sum = crc(sum, row.data(), row.size() * sizeof(row[0]));
    }
  }
  return sum;
}

std::uint32_t crc_of_positions(QFiltersKVCache& cache, std::size_t groups) {
  std::uint32_t sum = 0;
  for (std::size_t g = 0; g < groups; ++g) {
    const auto positions = cache.positions(g);
    sum = crc(sum, positions.data(), positions.size() * sizeof(positions[0]));
  }
  return sum;
}

std::uint32_t crc_of(const std::vector<float>& values) {
  return crc(0, values.data(), values.size() * sizeof(values[0]));
}

}  // namespace qfilters::golden
