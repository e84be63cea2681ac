#include "qfilters/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "qfilters/error.h"
#include "qfilters/limits.h"

#include "core/first_failure.h"
#include "core/shape_text.h"
#include "kernels/attend.h"

namespace qfilters {

namespace {

static_assert(kBlockRows == kernels::kTileRows);

// Queries one task holds: enough to pay for converting a tile, few enough to
// stay in cache and to balance threads.
constexpr std::size_t kTaskQueries = 64;
// Up to here reading 16-bit tiles directly is faster.
constexpr std::size_t kDecodeQueries = 8;

void check_shapes(
    const TensorView& queries, const RowsView& rows, const OutputView& out) {
  const RowShape& shape = rows.shape();
  const bool fits =
      queries.dtype == DType::kFloat32 && queries.batch == shape.batch &&
      is_size(queries.heads) && queries.heads % shape.kv_heads == 0 &&
      queries.tokens == rows.new_rows() && queries.dim == shape.key_dim &&
      out.batch == queries.batch && out.heads == queries.heads &&
      out.tokens == queries.tokens && out.dim == shape.value_dim;
  if (fits) return;
  throw Error(
      ErrorKind::kShape,
      std::string("attend: queries ") + to_string(queries.dtype) + " " +
          shape_text(queries) + " and out " +
          shape_text(out.batch, out.heads, out.tokens, out.dim) +
          " do not fit rows " +
          shape_text(
              shape.batch, shape.kv_heads, rows.new_rows(), shape.key_dim) +
          " with value dim " + std::to_string(shape.value_dim));
}

// Tiles of one KV head: stored full blocks as they are; the last stored block,
// if it is not full, and the new rows packed into blocks of the same layout.
class HeadTiles {
 public:
  void pack(const RowsView& rows, std::size_t group) {
    const RowShape& shape = rows.shape();
    const KVStore& store = rows.store();
    const std::size_t stored = store.rows(group);
    const std::size_t full = stored / kBlockRows;
    const std::size_t total = stored + rows.new_rows();
    const std::size_t count = (total + kBlockRows - 1) / kBlockRows;
    const std::size_t block = shape.block_bytes() / sizeof(std::uint16_t);
    packed_.resize((count - full) * block);
    tiles_.clear();
    for (std::size_t i = 0; i < count; ++i) {
      tiles_.push_back(
          i < full
              ? reinterpret_cast<const std::uint16_t*>(store.blocks(group)[i])
              : packed_.data() + (i - full) * block);
    }
    if (stored % kBlockRows != 0) {
      std::memcpy(
          packed_.data(), store.blocks(group)[full], shape.block_bytes());
    }
    for (std::size_t t = 0; t < rows.new_rows(); ++t) {
      const std::size_t row = stored % kBlockRows + t;
      std::uint16_t* tile = packed_.data() + row / kBlockRows * block;
      copy_new(rows, group, t, tile, row % kBlockRows);
    }
  }

  [[nodiscard]] const std::uint16_t* const* data() const noexcept {
    return tiles_.data();
  }

 private:
  static void copy_new(
      const RowsView& rows,
      std::size_t group,
      std::size_t token,
      std::uint16_t* tile,
      std::size_t slot) noexcept {
    const RowShape& shape = rows.shape();
    const std::size_t batch = group / shape.kv_heads;
    const std::size_t head = group % shape.kv_heads;
    const auto* key = static_cast<const std::uint16_t*>(
        rows.new_keys().row(batch, head, token));
    for (std::size_t d = 0; d < shape.key_dim; ++d) {
      tile[d * kBlockRows + slot] = key[d];
    }
    std::memcpy(
        tile + shape.key_dim * kBlockRows + slot * shape.value_dim,
        rows.new_values().row(batch, head, token),
        shape.value_dim * sizeof(std::uint16_t));
  }

  std::vector<std::uint16_t> packed_;
  std::vector<const std::uint16_t*> tiles_;
};

// Buffers of one thread, kept between calls so that decoding allocates nothing.
struct Scratch {
  std::vector<float> query;
  std::vector<float> out;
  std::vector<float> kernel;
  std::vector<std::uint32_t> first;
  std::vector<std::uint32_t> last;
};

// One call of attend(): what all its tasks share.
struct Call {
  const TensorView& queries;
  const RowsView& rows;
  const AttentionOptions& options;
  const OutputView& out;
  float scale;
  std::size_t share;  // query heads of one KV head

  // First row that a query at `position` may see, given the window.
  [[nodiscard]] std::size_t first_visible(
      std::size_t group, std::size_t token) const {
    const std::int64_t position =
        std::int64_t{rows.first_position()} + static_cast<std::int64_t>(token);
    if (options.window == 0 ||
        options.window > static_cast<std::size_t>(position)) {
      return 0;
    }
    const std::int64_t oldest =
        position - static_cast<std::int64_t>(options.window) + 1;
    const auto stored = rows.store().positions(group);
    const auto* const row = std::lower_bound(
        stored.data(),
        stored.data() + stored.size(),
        oldest,
        [](std::int32_t have, std::int64_t want) { return have < want; });
    const auto index = static_cast<std::size_t>(row - stored.data());
    if (index < stored.size()) return index;
    const std::int64_t into_new =
        std::max<std::int64_t>(0, oldest - rows.first_position());
    return index + static_cast<std::size_t>(into_new);
  }
};

void run_task(
    const Call& call,
    std::size_t group,
    const HeadTiles& tiles,
    std::size_t begin,
    std::size_t end) {
  thread_local Scratch scratch;
  const RowShape& shape = call.rows.shape();
  const std::size_t batch = group / shape.kv_heads;
  const std::size_t head = group % shape.kv_heads * call.share;
  const std::size_t count = (end - begin) * call.share;
  scratch.query.resize(count * shape.key_dim);
  scratch.out.resize(count * shape.value_dim);
  scratch.first.resize(count);
  scratch.last.resize(count);
  scratch.kernel.resize(
      kernels::attend_scratch(count, shape.key_dim, shape.value_dim));
  std::size_t q = 0;
  for (std::size_t t = begin; t < end; ++t) {
    const std::size_t first = call.first_visible(group, t);
    const std::size_t last = call.rows.store().rows(group) + t + 1;
    for (std::size_t h = 0; h < call.share; ++h, ++q) {
      const auto* from =
          static_cast<const float*>(call.queries.row(batch, head + h, t));
      float* query = scratch.query.data() + q * shape.key_dim;
      for (std::size_t d = 0; d < shape.key_dim; ++d) {
        query[d] = from[d] * call.scale;
      }
      scratch.first[q] = static_cast<std::uint32_t>(first);
      scratch.last[q] = static_cast<std::uint32_t>(last);
    }
  }
  const kernels::AttendTask task{
      tiles.data(),
      shape.key_dim,
      shape.value_dim,
      shape.dtype == DType::kFloat16 ? kernels::Half::kFloat16
                                     : kernels::Half::kBFloat16,
      call.options.soft_cap,
      count,
      scratch.query.data(),
      scratch.first.data(),
      scratch.last.data(),
      scratch.out.data()};
  if (count <= kDecodeQueries) {
    kernels::attend_decode(task, scratch.kernel.data());
  } else {
    kernels::attend_prefill(task, scratch.kernel.data());
  }
  q = 0;
  for (std::size_t t = begin; t < end; ++t) {
    for (std::size_t h = 0; h < call.share; ++h, ++q) {
      std::memcpy(
          call.out.row(batch, head + h, t),
          scratch.out.data() + q * shape.value_dim,
          shape.value_dim * sizeof(float));
    }
  }
}

}  // namespace

void attend(
    const TensorView& queries,
    const RowsView& rows,
    const AttentionOptions& options,
    const OutputView& out) {
  check_shapes(queries, rows, out);
  if (options.threads < 1 || options.threads > kMostThreads ||
      options.soft_cap < 0.0F || !std::isfinite(options.soft_cap) ||
      !std::isfinite(options.scale)) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "attend: threads=" + std::to_string(options.threads) +
            " scale=" + std::to_string(options.scale) +
            " soft_cap=" + std::to_string(options.soft_cap) + ": out of range");
  }
  if (queries.tokens == 0) return;
  const RowShape& shape = rows.shape();
  const Call call{
      queries,
      rows,
      options,
      out,
      options.scale != 0.0F
          ? options.scale
          : 1.0F / std::sqrt(static_cast<float>(shape.key_dim)),
      queries.heads / shape.kv_heads};
  const std::size_t per_task =
      std::max<std::size_t>(1, kTaskQueries / call.share);
  const std::size_t tasks_per_group =
      (queries.tokens + per_task - 1) / per_task;

  thread_local std::vector<HeadTiles> tiles;
  tiles.resize(std::max(tiles.size(), shape.groups()));
  auto& shared = tiles;  // of the calling thread, whichever thread uses it
  const auto groups = static_cast<std::ptrdiff_t>(shape.groups());
  const auto tasks = groups * static_cast<std::ptrdiff_t>(tasks_per_group);
  FirstFailure packing;
  FirstFailure running;
#pragma omp parallel num_threads(options.threads) if (options.threads > 1)
  {
#pragma omp for schedule(static)
    for (std::ptrdiff_t g = 0; g < groups; ++g) {
      const auto group = static_cast<std::size_t>(g);
      packing.guard([&] { shared[group].pack(rows, group); });
    }
    // The last tasks of a head see most rows: start with them.
#pragma omp for schedule(dynamic)
    for (std::ptrdiff_t i = tasks - 1; i >= 0; --i) {
      if (packing.failed()) continue;
      const auto task = static_cast<std::size_t>(i);
      const std::size_t group = task % shape.groups();
      const std::size_t begin = task / shape.groups() * per_task;
      const std::size_t end = std::min(begin + per_task, queries.tokens);
      running.guard([&] { run_task(call, group, shared[group], begin, end); });
    }
  }
  packing.rethrow();
  running.rethrow();
}

}  // namespace qfilters
