#include "qfilters/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "qfilters/error.h"
#include "qfilters/limits.h"

#include "core/attention_call.h"
#include "core/attention_plan.h"
#include "core/first_failure.h"
#include "core/partial_attention.h"
#include "core/shape_text.h"
#include "kernels/attend.h"

namespace qfilters {

namespace {

static_assert(kBlockRows == kernels::kTileRows);

// Up to here reading tiles directly is faster.
constexpr std::size_t kDecodeQueries = 8;

void check(
    const TensorView& queries,
    const RowsView& rows,
    const AttentionOptions& options,
    const OutputView& out) {
  const RowShape& shape = rows.shape();
  const bool fits =
      queries.dtype == DType::kFloat32 && queries.batch == shape.batch &&
      is_size(queries.heads) && queries.heads % shape.kv_heads == 0 &&
      queries.tokens == rows.new_rows() && queries.dim == shape.key_dim &&
      out.batch == queries.batch && out.heads == queries.heads &&
      out.tokens == queries.tokens && out.dim == shape.value_dim;
  if (!fits) {
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
  if (options.threads < 1 || options.threads > kMostThreads ||
      options.soft_cap < 0.0F || !std::isfinite(options.soft_cap) ||
      !std::isfinite(options.scale)) {
    throw Error(
        ErrorKind::kInvalidArgument,
        "attend: threads=" + std::to_string(options.threads) +
            " scale=" + std::to_string(options.scale) +
            " soft_cap=" + std::to_string(options.soft_cap) + ": out of range");
  }
}

// Tiles of one KV head: stored full blocks as they are; the last stored block,
// if it is not full, and the new rows packed into blocks of the same layout.
// Int8 blocks are all read as they are, and the new rows have their own.
class HeadTiles {
 public:
  void pack(const RowsView& rows, std::size_t group) {
    const RowShape& shape = rows.shape();
    const KVStore& store = rows.store();
    const std::size_t stored = store.rows(group);
    const bool int8 = shape.format == RowFormat::kInt8;
    const std::size_t full =
        (stored + (int8 ? kBlockRows - 1 : 0)) / kBlockRows;
    const std::size_t shared = int8 ? 0 : stored % kBlockRows;
    const std::size_t count =
        full + (shared + rows.new_rows() + kBlockRows - 1) / kBlockRows;
    const std::size_t block = kBlockRows * (shape.key_dim + shape.value_dim);
    packed_.resize((count - full) * block);
    tiles_.clear();
    for (std::size_t i = 0; i < count; ++i) {
      tiles_.push_back(
          i < full
              ? reinterpret_cast<const std::uint16_t*>(store.blocks(group)[i])
              : packed_.data() + (i - full) * block);
    }
    if (shared != 0) {
      std::memcpy(
          packed_.data(), store.blocks(group)[full], shape.block_bytes());
    }
    for (std::size_t t = 0; t < rows.new_rows(); ++t) {
      const std::size_t row = shared + t;
      std::uint16_t* tile = packed_.data() + row / kBlockRows * block;
      copy_new(rows, group, t, tile, row % kBlockRows);
    }
  }

  [[nodiscard]] const std::vector<const std::uint16_t*>& tiles()
      const noexcept {
    return tiles_;
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

// What one call works on, and its memory.
struct Work {
  AttentionPlan plan;
  std::vector<HeadTiles> tiles;  // by group
};

// Divides by the sum of the weights and hands over.
void write_out(
    const AttentionCall& call,
    const AttentionJob& job,
    const PartialAttention& sums,
    AttentionPlan& plan) noexcept {
  const auto& [group, begin, end] = job.queries;
  const RowShape& shape = call.rows.shape();
  const std::size_t batch = group / shape.kv_heads;
  const std::size_t head = group % shape.kv_heads * call.share;
  std::size_t q = 0;
  for (std::size_t t = begin; t < end; ++t) {
    for (std::size_t h = 0; h < call.share; ++h, ++q) {
      const float sum = sums.softmax[q].sum;
      const float* from = sums.out + q * shape.value_dim;
      float* const out = call.out.row(batch, head + h, t);
      for (std::size_t d = 0; d < shape.value_dim; ++d)
        out[d] = sum == 0.0F ? 0.0F : from[d] / sum;
    }
  }
  const auto kept = plan.softmax(job.queries);
  std::copy_n(sums.softmax, kept.size(), kept.data());
}

// Buffers of one thread.
struct Scratch {
  GatheredQueries queries;
  std::vector<float> out;
  std::vector<kernels::Softmax> softmax;
  std::vector<float> kernel;

  void attend(
      const AttentionCall& call,
      const HeadTiles& tiles,
      RowRange rows,
      const PartialAttention& to) {
    kernels::AttendTask task = queries.over(call, tiles.tiles(), rows);
    task.out = to.out;
    task.softmax = to.softmax;
    if (task.queries <= kDecodeQueries) {
      kernels::attend_decode(task, kernel.data());
    } else {
      kernels::attend_prefill(task, kernel.data());
    }
  }
};

void run_item(
    const AttentionCall& call, const AttentionItem& item, Work& work) {
  thread_local Scratch scratch;
  const RowShape& shape = call.rows.shape();
  const AttentionJob& job = work.plan.jobs()[item.job];
  const std::size_t group = job.queries.group;
  const HeadTiles& tiles = work.tiles[group];
  scratch.queries.gather(call, job.queries);
  scratch.kernel.resize(
      kernels::attend_scratch(job.count, shape.key_dim, shape.value_dim));
  std::size_t block = item.first_block;
  if (work.plan.split()) {
    const PartialAttention sums = work.plan.partial(job, block);
    scratch.attend(call, tiles, call.rows_of(group, block), sums);
    return;
  }
  const std::size_t floats = job.count * shape.value_dim;
  scratch.out.resize(2 * floats);
  scratch.softmax.resize(2 * job.count);
  const PartialAttention sums{scratch.out.data(), scratch.softmax.data()};
  const PartialAttention next{sums.out + floats, sums.softmax + job.count};
  scratch.attend(call, tiles, call.rows_of(group, block), sums);
  while (++block < item.end_block) {
    scratch.attend(call, tiles, call.rows_of(group, block), next);
    merge(sums, next, job.count, shape.value_dim);
  }
  write_out(call, job, sums, work.plan);
}

void merge_job(
    const AttentionCall& call,
    const AttentionJob& job,
    AttentionPlan& plan) noexcept {
  const PartialAttention sums = plan.partial(job, job.first_block);
  for (std::size_t b = job.first_block + 1; b < job.end_block; ++b) {
    merge(sums, plan.partial(job, b), job.count, call.rows.shape().value_dim);
  }
  write_out(call, job, sums, plan);
}

void clear(AttentionStatistics& statistics, const RowsView& rows) {
  statistics.rows.resize(rows.shape().groups());
  for (std::size_t g = 0; g < statistics.rows.size(); ++g) {
    statistics.rows[g].assign(rows.rows(g), 0.0F);
  }
}

// What the queries that count make of one row block of a head, in their order.
void add_statistics(
    const AttentionCall& call,
    std::size_t group,
    std::size_t block,
    Work& work,
    AttentionStatistics& statistics) {
  thread_local GatheredQueries queries;
  const std::size_t tokens = call.queries.tokens;
  const std::size_t last = statistics.last_queries;
  const std::size_t first = last == 0 ? 0 : tokens - std::min(last, tokens);
  for (const AttentionJob& job : work.plan.jobs_of(group)) {
    TaskQueries which = job.queries;
    which.begin = std::max(which.begin, first);
    if (which.begin >= which.end || block < job.first_block ||
        block >= job.end_block) {
      continue;
    }
    queries.gather(call, which);
    kernels::AttendTask task = queries.over(
        call, work.tiles[group].tiles(), call.rows_of(group, block));
    task.softmax = work.plan.softmax(which).data();
    kernels::add_weights(
        task,
        statistics.kind == AttentionStatistics::Kind::kSum
            ? kernels::Weights::kSum
            : kernels::Weights::kMax,
        statistics.rows[group].data());
  }
}

// All of a call, on its threads.
void run(
    const AttentionCall& call, Work& work, AttentionStatistics* statistics) {
  const auto groups = static_cast<std::ptrdiff_t>(call.rows.shape().groups());
  const auto items = static_cast<std::ptrdiff_t>(work.plan.items().size());
  const auto jobs = static_cast<std::ptrdiff_t>(work.plan.jobs().size());
  const auto blocks = groups * static_cast<std::ptrdiff_t>(work.plan.blocks());
  const int threads = call.options.threads;
  FirstFailure packing;
  FirstFailure running;
  FirstFailure counting;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp for schedule(static)
    for (std::ptrdiff_t g = 0; g < groups; ++g) {
      const auto group = static_cast<std::size_t>(g);
      packing.guard([&] { work.tiles[group].pack(call.rows, group); });
    }
#pragma omp for schedule(dynamic) nowait
    for (std::ptrdiff_t i = 0; i < items; ++i) {
      if (packing.failed()) continue;
      const auto& item = work.plan.items()[static_cast<std::size_t>(i)];
      running.guard([&] { run_item(call, item, work); });
    }
    if (work.plan.split()) {
#pragma omp barrier
#pragma omp for schedule(static) nowait
      for (std::ptrdiff_t i = 0; i < jobs; ++i) {
        if (packing.failed() || running.failed()) continue;
        const auto job = static_cast<std::size_t>(i);
        merge_job(call, work.plan.jobs()[job], work.plan);
      }
    }
    if (statistics != nullptr) {
#pragma omp barrier
#pragma omp for schedule(dynamic) nowait
      for (std::ptrdiff_t i = 0; i < blocks; ++i) {
        if (packing.failed() || running.failed()) continue;
        const auto group = static_cast<std::size_t>(i % groups);
        const auto block = static_cast<std::size_t>(i / groups);
        counting.guard(
            [&] { add_statistics(call, group, block, work, *statistics); });
      }
    }
  }
  packing.rethrow();
  running.rethrow();
  counting.rethrow();
}

}  // namespace

void attend(
    const TensorView& queries,
    const RowsView& rows,
    const AttentionOptions& options,
    const OutputView& out,
    AttentionStatistics* statistics) {
  check(queries, rows, options, out);
  const RowShape& shape = rows.shape();
  if (statistics != nullptr) clear(*statistics, rows);
  if (queries.tokens == 0) return;
  const AttentionCall call{
      queries,
      rows,
      options,
      out,
      options.scale != 0.0F
          ? options.scale
          : 1.0F / std::sqrt(static_cast<float>(shape.key_dim)),
      queries.heads / shape.kv_heads};
  thread_local Work kept;
  kept.tiles.resize(std::max(kept.tiles.size(), shape.groups()));
  kept.plan.prepare(call, statistics != nullptr);
  run(call, kept, statistics);
}

}  // namespace qfilters
