// qf_filters: a FilterBank.
#include <utility>
#include <vector>

#include "qfilters/filter_file.h"
#include "qfilters/limits.h"

#include "c_api/support.h"

namespace c_api = qfilters::c_api;

namespace {

using qfilters::FilterBank;
using qfilters::FilterMetadata;
using qfilters::LayerFilters;

const FilterBank& bank_of(const qf_filters* filters) {
  return *c_api::deref(filters, "filters").bank;
}

void make_handle(qf_filters** out, FilterBank bank) {
  *out = new qf_filters{std::make_shared<const FilterBank>(std::move(bank))};
}

// The number of values [heads, dim] of a layer.
std::size_t values_of(std::size_t heads, std::size_t dim) {
  if (qfilters::is_size(heads) && qfilters::is_size(dim)) return heads * dim;
  throw qfilters::Error(
      qfilters::ErrorKind::kShape,
      "a layer of [heads, dim] = [" + std::to_string(heads) + ", " +
          std::to_string(dim) + "]: each must be in 1.." +
          std::to_string(qfilters::kMostSize));
}

FilterBank make_bank(
    std::span<const qf_filter_layer> layers,
    const char* model_id,
    const char* model_fingerprint) {
  std::vector<LayerFilters> copies;
  for (const qf_filter_layer& layer : layers) {
    const std::size_t count = values_of(layer.heads, layer.dim);
    c_api::deref(layer.values, "values");
    copies.push_back(
        {layer.heads, layer.dim, {layer.values, layer.values + count}});
  }
  FilterMetadata metadata;
  metadata.model_id = c_api::text_or_empty(model_id);
  metadata.model_fingerprint = c_api::text_or_empty(model_fingerprint);
  return {std::move(copies), std::move(metadata)};
}

std::string text_by_name(const FilterBank& bank, std::string_view name) {
  const FilterMetadata& metadata = bank.metadata();
  if (name == "model_id") return metadata.model_id;
  if (name == "model_fingerprint") return metadata.model_fingerprint;
  if (name == "query_site") return metadata.query_site;
  if (name == "dataset") return metadata.dataset;
  if (name == "text_hash") return metadata.text_hash;
  if (name == "fingerprint") return bank.fingerprint();
  c_api::reject("no text is named '" + std::string(name) + "'");
}

}  // namespace

// C has no default arguments. NOLINTNEXTLINE(readability-function-size)
qf_status qf_filters_create(
    const float* values,
    size_t layers,
    size_t heads,
    size_t dim,
    const char* model_id,
    const char* model_fingerprint,
    qf_filters** out) {
  return c_api::guard(__func__, [&] {
    c_api::deref(out, "out");
    std::vector<qf_filter_layer> parts;
    const std::size_t each = values_of(heads, dim);
    if (layers > qfilters::kMostSize) {
      throw qfilters::Error(
          qfilters::ErrorKind::kShape,
          std::to_string(layers) + " layers: at most " +
              std::to_string(qfilters::kMostSize));
    }
    if (layers > 0) c_api::deref(values, "values");
    for (std::size_t l = 0; l < layers; ++l) {
      parts.push_back({heads, dim, values + l * each});
    }
    make_handle(out, make_bank(parts, model_id, model_fingerprint));
  });
}

qf_status qf_filters_create_layers(
    const qf_filter_layer* layers,
    size_t count,
    const char* model_id,
    const char* model_fingerprint,
    qf_filters** out) {
  return c_api::guard(__func__, [&] {
    c_api::deref(out, "out");
    if (count > 0) c_api::deref(layers, "layers");
    make_handle(out, make_bank({layers, count}, model_id, model_fingerprint));
  });
}

qf_status qf_filters_load(
    const char* path,
    const char* expect_model_id,
    const char* expect_model_fingerprint,
    qf_filters** out) {
  return c_api::guard(__func__, [&] {
    c_api::deref(out, "out");
    qfilters::FilterExpectation expected;
    if (expect_model_id != nullptr) expected.model_id = expect_model_id;
    if (expect_model_fingerprint != nullptr) {
      expected.model_fingerprint = expect_model_fingerprint;
    }
    make_handle(
        out, qfilters::load_filters(&c_api::deref(path, "path"), expected));
  });
}

qf_status qf_filters_save(const qf_filters* filters, const char* path) {
  return c_api::guard(__func__, [&] {
    qfilters::save_filters(bank_of(filters), &c_api::deref(path, "path"));
  });
}

void qf_filters_free(qf_filters* filters) {
  delete filters;
}

qf_status qf_filters_layers(const qf_filters* filters, size_t* layers) {
  return c_api::guard(__func__, [&] {
    c_api::deref(layers, "layers") = bank_of(filters).layers();
  });
}

qf_status qf_filters_shape(
    const qf_filters* filters, size_t layer, size_t* heads, size_t* dim) {
  return c_api::guard(__func__, [&] {
    const LayerFilters& found = bank_of(filters).layer(layer);
    c_api::deref(heads, "heads");
    c_api::deref(dim, "dim");
    *heads = found.heads;
    *dim = found.dim;
  });
}

qf_status qf_filters_values(
    const qf_filters* filters,
    size_t layer,
    float* out,
    size_t capacity,
    size_t* size) {
  return c_api::guard(__func__, [&] {
    const LayerFilters& found = bank_of(filters).layer(layer);
    c_api::copy_out<float>(found.values, out, capacity, size);
  });
}

qf_status qf_filters_text(
    const qf_filters* filters,
    const char* name,
    char* out,
    size_t capacity,
    size_t* size) {
  return c_api::guard(__func__, [&] {
    const FilterBank& bank = bank_of(filters);
    c_api::copy_text(
        text_by_name(bank, &c_api::deref(name, "name")), out, capacity, size);
  });
}
