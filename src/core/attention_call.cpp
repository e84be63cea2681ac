#include "core/attention_call.h"

#include "core/half.h"

namespace qfilters {

std::size_t AttentionCall::first_visible(
    std::size_t group, std::size_t token) const noexcept {
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

void GatheredQueries::gather(
    const AttentionCall& call, const TaskQueries& which) {
  group_ = which.group;
  const RowShape& shape = call.rows.shape();
  const std::size_t batch = which.group / shape.kv_heads;
  const std::size_t head = which.group % shape.kv_heads * call.share;
  const std::size_t count = (which.end - which.begin) * call.share;
  query_.resize(count * shape.key_dim);
  for (auto* rows : {&first_, &last_, &first_in_range_, &last_in_range_})
    rows->resize(count);
  std::size_t q = 0;
  for (std::size_t t = which.begin; t < which.end; ++t) {
    const std::size_t first = call.first_visible(which.group, t);
    const std::size_t last = call.rows.store().rows(which.group) + t + 1;
    for (std::size_t h = 0; h < call.share; ++h, ++q) {
      const auto* from =
          static_cast<const float*>(call.queries.row(batch, head + h, t));
      float* query = query_.data() + q * shape.key_dim;
      for (std::size_t d = 0; d < shape.key_dim; ++d) {
        query[d] = from[d] * call.scale;
      }
      first_[q] = static_cast<std::uint32_t>(first);
      last_[q] = static_cast<std::uint32_t>(last);
    }
  }
}

kernels::AttendTask GatheredQueries::over(
    const AttentionCall& call,
    const std::vector<const std::uint16_t*>& tiles,
    RowRange rows) {
  const auto begin = static_cast<std::uint32_t>(rows.begin);
  const auto end = static_cast<std::uint32_t>(rows.end);
  for (std::size_t q = 0; q < count(); ++q) {
    first_in_range_[q] = std::clamp(first_[q], begin, end);
    last_in_range_[q] = std::clamp(last_[q], begin, end);
  }
  const RowShape& shape = call.rows.shape();
  return {
      tiles.data(),
      tiles.size(),
      shape.format == RowFormat::kInt8 ? call.rows.store().rows(group_) : 0,
      shape.key_dim,
      shape.value_dim,
      half_of(shape.dtype),
      call.options.soft_cap,
      count(),
      query_.data(),
      first_in_range_.data(),
      last_in_range_.data(),
      nullptr,
      nullptr};
}

}  // namespace qfilters
