/* One attention layer's KV cache in C: filters, tokens in chunks, attention,
 * the rows that stay, a snapshot, an error. A test checks what it prints. */
#include <qfilters/c_api.h>
#include <stdio.h>
#include <stdlib.h>

enum { kKvHeads = 2, kHeads = 4, kDim = 16, kChunk = 25, kTokens = 100 };

static void check(qf_status status) {
  if (status == QF_OK) return;
  fprintf(stderr, "%s\n", qf_last_error());
  exit(1);
}

/* Every tenth key points where the filters look. */
static void make_rows(size_t first, float* keys, float* values) {
  for (size_t h = 0; h < kKvHeads; ++h) {
    for (size_t t = 0; t < kChunk; ++t) {
      for (size_t d = 0; d < kDim; ++d) {
        const size_t i = (h * kChunk + t) * kDim + d;
        keys[i] = d == 0 && (first + t) % 10 == 0 ? 1.0F : 0.0F;
        values[i] = (float)d;
      }
    }
  }
}

static void feed(qf_cache* cache) {
  static float keys[kKvHeads * kChunk * kDim], values[kKvHeads * kChunk * kDim];
  static float queries[kHeads * kChunk * kDim], out[kHeads * kChunk * kDim];
  const qf_tensor k =
      qf_tensor_dense(keys, QF_FLOAT32, 1, kKvHeads, kChunk, kDim);
  const qf_tensor v =
      qf_tensor_dense(values, QF_FLOAT32, 1, kKvHeads, kChunk, kDim);
  const qf_tensor q =
      qf_tensor_dense(queries, QF_FLOAT32, 1, kHeads, kChunk, kDim);
  const qf_output o = qf_output_dense(out, 1, kHeads, kChunk, kDim);
  for (size_t first = 0; first < kTokens; first += kChunk) {
    size_t rows = 0;
    make_rows(first, keys, values);
    check(qf_cache_update(cache, &k, &v));
    check(qf_cache_attend(cache, &q, NULL, &o));
    check(qf_cache_fetched_positions(cache, 0, NULL, 0, &rows));
    printf(
        "tokens %2zu to %zu see up to %zu rows",
        first,
        first + kChunk - 1,
        rows);
    printf(", value 3 is %.1f\n", (double)out[3]);
  }
}

static void show(const char* title, qf_cache* cache) {
  int32_t positions[kTokens];
  size_t rows = 0;
  check(qf_cache_positions(cache, 0, positions, kTokens, &rows));
  printf("%s", title);
  for (size_t r = 0; r < rows; ++r) {
    printf(" %d", (int)positions[r]);
  }
  printf("\n");
}

int main(void) {
  float directions[kKvHeads * kDim] = {0};
  qf_filters* filters = NULL;
  qf_cache* cache = NULL;
  qf_cache* later = NULL;
  qf_config config;
  size_t size = 0;
  void* saved;

  for (size_t h = 0; h < kKvHeads; ++h) {
    directions[h * kDim] = 1.0F;
  }
  check(qf_filters_create(
      directions, 1, kKvHeads, kDim, "example", NULL, &filters));
  check(qf_config_init(&config, sizeof config));
  config.budget = 12;
  config.n_sink = 2;
  check(qf_cache_create(&config, filters, 0, &cache));
  feed(cache);
  show("kept:", cache);

  check(qf_cache_save(cache, NULL, 0, &size));
  saved = malloc(size);
  if (saved == NULL) return 1;
  check(qf_cache_save(cache, saved, size, &size));
  check(qf_cache_create(&config, filters, 0, &later));
  check(qf_cache_restore(later, saved, size));
  show("restored:", later);

  if (qf_cache_restore(later, saved, size / 2) == QF_FILE) {
    printf("error: %s\n", qf_last_error());
  }
  free(saved);
  qf_cache_free(later);
  qf_cache_free(cache);
  qf_filters_free(filters);
  return 0;
}
