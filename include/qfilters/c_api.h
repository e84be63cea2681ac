#ifndef QFILTERS_C_API_H
#define QFILTERS_C_API_H

/* qfilters for C, and for every language that can call C. Link qfilters::c
 * (libqfilters_c). What the functions do stands in the C++ headers: kv_cache.h
 * for qf_cache, sequence_cache.h for qf_sequence, attention.h, filter_file.h.
 *
 * Errors   Every function that can fail returns a qf_status; qf_last_error()
 *          has the reason. On failure outputs are untouched, but for sizes of
 *          buffers, and handles are as before; what holds instead stands at
 *          the few functions that differ. NULL where a pointer is needed is
 *          QF_INVALID_ARGUMENT. No C++ exception gets out; memory that cannot
 *          be had is QF_OUT_OF_MEMORY, attention's output is unspecified then.
 * Handles  belong to the caller until X_free(), which accepts NULL; using or
 *          freeing a handle after that is undefined. A handle serves one
 *          thread at a time; distinct handles are independent.
 * Sizes    Batch, heads, dimensions, batch * heads and layers of filters are
 *          at most 2^20, tokens of a sequence at most 2^31 - 1, threads at
 *          most 512 (limits.h).
 * Buffers  belong to the caller: `out` has room for `capacity` elements, and
 *          *size becomes the number that there are. Capacity 0 asks for the
 *          size and writes nothing else, `out` may be NULL then; a capacity
 *          that is too small otherwise is QF_INVALID_ARGUMENT. Texts are UTF-8
 *          and their size counts the ending NUL.
 * Structs  that may grow are plain, since every language binds fields: their
 *          X_init() takes sizeof and writes the defaults, results take sizeof.
 *          Another size than this library's is QF_INVALID_ARGUMENT.
 */

/* A C header: NOLINTBEGIN(modernize-*,readability-identifier-naming) */

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define QF_API __attribute__((visibility("default")))
#else
#define QF_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t qf_status;

enum {
  QF_OK = 0,
  QF_INVALID_ARGUMENT = 1, /* an option or argument outside its range */
  QF_SHAPE = 2,            /* shapes or types that do not fit together */
  QF_FILE = 3,             /* missing, damaged or unwritable file or bytes */
  QF_MISMATCH = 4,         /* valid data of another model or setting */
  QF_UNSUPPORTED = 5,      /* this build cannot do it */
  QF_MEMORY_LIMIT = 6,     /* the byte limit would be exceeded */
  QF_LOW_RETENTION = 7,    /* the retention floor was crossed */
  QF_RUNTIME = 8,          /* the model runtime failed */
  QF_OUT_OF_MEMORY = 9,
  QF_INTERNAL = 10 /* a defect of the library */
};

/* Reason of this thread's last failure; "" before any. Owned by the library,
 * valid until the next failure on this thread. */
QF_API const char* qf_last_error(void);

/* "0.1.0"; a constant. */
QF_API const char* qf_version(void);

/* Instruction sets, see isa.h: the active one; those that can run here, best
 * first, separated by commas; the choice ("auto" or "": the best), which
 * counts for the process and is QF_INVALID_ARGUMENT when it cannot run. */
QF_API qf_status qf_active_isa(char* out, size_t capacity, size_t* size);
QF_API qf_status qf_runnable_isas(char* out, size_t capacity, size_t* size);
QF_API qf_status qf_set_isa(const char* name);

/* ---- Tensors ---------------------------------------------------------- */

enum { QF_FLOAT32 = 0, QF_FLOAT16 = 1, QF_BFLOAT16 = 2 };

/* A borrowed tensor [batch, heads, tokens, dim]; the last axis is dense,
 * strides count elements. `data` may be NULL only if there is no element. */
typedef struct qf_tensor {
  const void* data;
  int32_t dtype; /* QF_FLOAT32, QF_FLOAT16 or QF_BFLOAT16 */
  size_t batch;
  size_t heads;
  size_t tokens;
  size_t dim;
  ptrdiff_t batch_stride;
  ptrdiff_t head_stride;
  ptrdiff_t token_stride;
} qf_tensor;

/* Where attention writes: float32, otherwise as qf_tensor. */
typedef struct qf_output {
  float* data;
  size_t batch;
  size_t heads;
  size_t tokens;
  size_t dim;
  ptrdiff_t batch_stride;
  ptrdiff_t head_stride;
  ptrdiff_t token_stride;
} qf_output;

/* Views of dense arrays in the order [batch, heads, tokens, dim]. */
QF_API qf_tensor qf_tensor_dense(
    const void* data,
    int32_t dtype,
    size_t batch,
    size_t heads,
    size_t tokens,
    size_t dim);
QF_API qf_output qf_output_dense(
    float* data, size_t batch, size_t heads, size_t tokens, size_t dim);

typedef struct qf_attention {
  size_t struct_size; /* set by qf_attention_init() */
  float scale;        /* applied to q . k; 0 means 1 / sqrt(dim) */
  float soft_cap;     /* s -> cap * tanh(s / cap); 0 means off */
  size_t window;      /* query q sees keys k with q - k < window; 0: all */
  int32_t threads;    /* 1..512; never changes a bit of the result */
} qf_attention;

QF_API qf_status qf_attention_init(qf_attention* options, size_t struct_size);

/* ---- Filters ---------------------------------------------------------- */

/* One frozen direction per layer and KV head; larger projection = keep.
 * Immutable: caches and sequences made from it may outlive it. */
typedef struct qf_filters qf_filters;

typedef struct qf_filter_layer {
  size_t heads;
  size_t dim;
  const float* values; /* [heads, dim] */
} qf_filter_layer;

/* From values [layers, heads, dim], or layer by layer when shapes differ; the
 * values are copied. `model_id` and `model_fingerprint` may be NULL: unknown.
 * QF_SHAPE without layers and for sizes of 0 or beyond the limits above,
 * QF_INVALID_ARGUMENT for a value that is not finite. */
QF_API qf_status qf_filters_create(
    const float* values,
    size_t layers,
    size_t heads,
    size_t dim,
    const char* model_id,
    const char* model_fingerprint,
    qf_filters** out);
QF_API qf_status qf_filters_create_layers(
    const qf_filter_layer* layers,
    size_t count,
    const char* model_id,
    const char* model_fingerprint,
    qf_filters** out);

/* Reads and writes .npz, .safetensors and .gguf, each with its usual sign. An
 * expectation may be NULL. QF_FILE with path and reason, QF_MISMATCH for
 * another model_id or another fingerprint where the file has one; saving
 * QF_SHAPE when the format cannot hold layers that differ. */
QF_API qf_status qf_filters_load(
    const char* path,
    const char* expect_model_id,
    const char* expect_model_fingerprint,
    qf_filters** out);
QF_API qf_status qf_filters_save(const qf_filters* filters, const char* path);

QF_API void qf_filters_free(qf_filters* filters); /* twice: undefined */

QF_API qf_status qf_filters_layers(const qf_filters* filters, size_t* layers);

/* QF_INVALID_ARGUMENT for a layer that does not exist. */
QF_API qf_status qf_filters_shape(
    const qf_filters* filters, size_t layer, size_t* heads, size_t* dim);

/* Values [heads, dim] of a layer. */
QF_API qf_status qf_filters_values(
    const qf_filters* filters,
    size_t layer,
    float* out,
    size_t capacity,
    size_t* size);

/* A text by name: "model_id", "model_fingerprint", "query_site", "dataset",
 * "text_hash", or "fingerprint" of the filters themselves. Unknown metadata is
 * "", an unknown name QF_INVALID_ARGUMENT. */
QF_API qf_status qf_filters_text(
    const qf_filters* filters,
    const char* name,
    char* out,
    size_t capacity,
    size_t* size);

/* ---- The cache of one attention layer ---------------------------------- */

typedef struct qf_cache qf_cache;

enum {
  QF_ON_LOW_RETENTION_WARN = 0,
  QF_ON_LOW_RETENTION_RAISE = 1, /* QF_LOW_RETENTION of qf_cache_update() */
  QF_ON_LOW_RETENTION_IGNORE = 2
};

/* See config.h. */
typedef struct qf_config {
  size_t struct_size;   /* set by qf_config_init() */
  int64_t budget;       /* rows kept per KV head, sinks and recent included */
  int64_t n_sink;       /* leading rows that are never evicted */
  int64_t recent;       /* trailing rows that are never evicted */
  int64_t interval;     /* evict only once budget + interval rows are held */
  int64_t calib_tokens; /* key-SVD fallback: tokens before it is frozen */
  int64_t sign;         /* +1 as published, -1 inverted */
  double min_retention; /* floor of rows kept / tokens seen; 0: none */
  int32_t on_low_retention; /* at the first crossing of the floor */
} qf_config;

QF_API qf_status qf_config_init(qf_config* config, size_t struct_size);

/* Layer `layer` of `filters`, or without filters (NULL) the key-SVD fallback.
 * `config` may be NULL: the defaults. QF_INVALID_ARGUMENT for a bad value or a
 * layer that does not exist. */
QF_API qf_status qf_cache_create(
    const qf_config* config,
    const qf_filters* filters,
    size_t layer,
    qf_cache** out);

QF_API void qf_cache_free(qf_cache* cache); /* twice: undefined */

/* Takes new rows [batch, kv_heads, tokens, dim] of any dtype and copies them.
 * QF_SHAPE, QF_MISMATCH or QF_INVALID_ARGUMENT before anything changes;
 * QF_LOW_RETENTION after the update is complete, its rows cannot be attended
 * over then; QF_OUT_OF_MEMORY with the update before it settled. */
QF_API qf_status qf_cache_update(
    qf_cache* cache, const qf_tensor* keys, const qf_tensor* values);

/* The same without a copy of rows that are of the cache's type (Inputs in
 * kv_cache.h): they must stay valid and unchanged until the next update or a
 * function that settles has succeeded. Faster where few new rows are kept. */
QF_API qf_status qf_cache_update_borrowed(
    qf_cache* cache, const qf_tensor* keys, const qf_tensor* values);

/* Attention over the rows of the last update: those stored before it, then all
 * new ones. queries float32 [batch, query_heads, tokens, key_dim], out
 * [batch, query_heads, tokens, value_dim]; `options` may be NULL. QF_SHAPE, or
 * QF_INVALID_ARGUMENT when that update has been settled (functions below that
 * settle say so). */
QF_API qf_status qf_cache_attend(
    const qf_cache* cache,
    const qf_tensor* queries,
    const qf_attention* options,
    const qf_output* out);

/* The rows that qf_cache_attend() reads, of one group (batch * kv_heads +
 * head): original positions, keys [rows, key_dim] and values
 * [rows, value_dim] in the cache's 16-bit type. Errors as qf_cache_attend()
 * and QF_INVALID_ARGUMENT for a group that does not exist. */
QF_API qf_status qf_cache_fetched_positions(
    const qf_cache* cache,
    size_t group,
    int32_t* out,
    size_t capacity,
    size_t* size);
QF_API qf_status qf_cache_fetched_keys(
    const qf_cache* cache,
    size_t group,
    uint16_t* out,
    size_t capacity,
    size_t* size);
QF_API qf_status qf_cache_fetched_values(
    const qf_cache* cache,
    size_t group,
    uint16_t* out,
    size_t capacity,
    size_t* size);

/* Applies the last update's eviction now; otherwise the next update does.
 * Ends qf_cache_attend() until then. Functions below that settle do so once
 * they write their result: unless they say so not to tell a size, and not when
 * they fail, QF_OUT_OF_MEMORY apart. */
QF_API qf_status qf_cache_settle(qf_cache* cache);

/* The rows stored for one group once the last update is settled. All settle.
 * QF_INVALID_ARGUMENT before the first update and for a group that does not
 * exist. */
QF_API qf_status qf_cache_positions(
    qf_cache* cache, size_t group, int32_t* out, size_t capacity, size_t* size);
QF_API qf_status qf_cache_scores(
    qf_cache* cache, size_t group, float* out, size_t capacity, size_t* size);
QF_API qf_status qf_cache_keys(
    qf_cache* cache,
    size_t group,
    uint16_t* out,
    size_t capacity,
    size_t* size);
QF_API qf_status qf_cache_values(
    qf_cache* cache,
    size_t group,
    uint16_t* out,
    size_t capacity,
    size_t* size);

/* A group's filter [key_dim]; size 0 until the fallback has frozen it. Settles
 * nothing. Errors as above. */
QF_API qf_status qf_cache_filter(
    const qf_cache* cache,
    size_t group,
    float* out,
    size_t capacity,
    size_t* size);

/* Counters, see kv_cache.h, and the shape; zeros before the first update.
 * Settles nothing that qf_cache_attend() could read. */
typedef struct qf_cache_stats {
  size_t offset; /* true position of the next token */
  size_t batch;
  size_t kv_heads;
  size_t key_dim;
  size_t value_dim;
  int32_t dtype;        /* of the rows: QF_FLOAT16 or QF_BFLOAT16 */
  size_t tokens_kept;   /* rows of group 0 */
  uint64_t tokens_seen; /* summed over batch and heads */
  uint64_t kept_bytes;  /* rows of all heads, and the filters */
  uint64_t full_bytes;  /* if every row had been kept */
  uint64_t row_bytes;   /* rows of all heads */
  uint64_t non_finite_scores;
  double compression_ratio; /* full_bytes / kept_bytes */
} qf_cache_stats;

QF_API qf_status
qf_cache_get_stats(qf_cache* cache, qf_cache_stats* out, size_t struct_size);

enum { QF_MASK_NONE = 0, QF_MASK_CAUSAL = 1, QF_MASK_ARRAY = 2 };

typedef struct qf_mask {
  int32_t kind;
  size_t batch; /* of the array; 0 without one */
  size_t queries;
  size_t keys;
} qf_mask;

/* Mask for `tokens` coming tokens over the stored rows and themselves; window
 * 0 means none. `allowed` gets [batch, 1, queries, keys], 1 = may attend, of
 * kind QF_MASK_ARRAY, else nothing. QF_INVALID_ARGUMENT when positions would
 * exceed int32. That kind settles, also to tell the size and when the capacity
 * turns out to be too small. */
QF_API qf_status qf_cache_make_mask(
    qf_cache* cache,
    size_t tokens,
    int32_t return_array,
    size_t window,
    qf_mask* mask,
    uint8_t* allowed,
    size_t capacity,
    size_t* size);

/* Everything a later process needs to continue bit for bit, in a cache of the
 * same config and filters. Saving settles; asking for the size costs as much
 * and settles too, as does a capacity that turns out to be too small.
 * Restoring ends qf_cache_attend() and holds old and new rows at the same
 * time. QF_MISMATCH naming what differs, QF_FILE for damaged bytes: everything
 * is as before then. */
QF_API qf_status
qf_cache_save(qf_cache* cache, void* out, size_t capacity, size_t* size);
QF_API qf_status
qf_cache_restore(qf_cache* cache, const void* saved, size_t size);

/* `handler` gets the warnings of qf_cache_update(), with `user` as it is given
 * here; NULL: nobody does, as at first. The message is valid during the call.
 * The handler must not call the cache and must return. */
typedef void (*qf_warning_handler)(void* user, const char* message);
QF_API qf_status
qf_cache_on_warning(qf_cache* cache, qf_warning_handler handler, void* user);

/* ---- The cache of a whole model ----------------------------------------- */

typedef struct qf_sequence qf_sequence;

typedef struct qf_layer {
  size_t kv_heads;
  size_t key_dim;
  size_t value_dim;
  size_t window; /* 0: global, within the budget; else a sliding window */
} qf_layer;

enum {
  QF_ROWS_TEMPORAL = 0, /* positions of a head's rows ascend */
  QF_ROWS_SLOT = 1      /* a new row takes the slot of the one that goes */
};

/* See RowFormat in kv_store.h. */
enum {
  QF_ROW_FORMAT_SAME = 0, /* the 16 bits that come in */
  QF_ROW_FORMAT_INT8 = 1  /* about half the bytes, rounded */
};

/* Who shares a budget: BudgetRule in policy.h. */
enum { QF_RULE_UNIFORM = 0, QF_RULE_PER_LAYER = 1, QF_RULE_SHARED = 2 };

/* See sequence_cache.h and policy.h. */
typedef struct qf_sequence_config {
  size_t struct_size; /* set by qf_sequence_config_init() */
  size_t batch;
  int32_t dtype;     /* QF_FLOAT16 or QF_BFLOAT16 */
  int32_t threads;   /* 1..512; never changes a result */
  size_t byte_limit; /* of all rows; 0: none */
  size_t budget;     /* rows kept per KV head, sinks and recent included */
  size_t sinks;
  size_t recent;
  size_t interval;    /* evict only once budget + interval rows are held */
  int32_t sign;       /* policy qfilters: +1 as published, -1 inverted */
  uint64_t seed;      /* policy random */
  int32_t row_order;  /* QF_ROWS_*; never changes which rows are kept */
  int32_t row_format; /* QF_ROW_FORMAT_*: how rows are stored */
  int32_t rule;       /* QF_RULE_*; policy auto is made for QF_RULE_SHARED */
  double floor;       /* share of the budget each sharing head keeps */
  size_t block;       /* rows that are chosen together */
} qf_sequence_config;

QF_API qf_status
qf_sequence_config_init(qf_sequence_config* config, size_t struct_size);

/* `policy` is full, auto, qfilters, streaming, knorm or random; `filters` are
 * needed by auto and qfilters, each its own kind, else they may be NULL, as
 * `config` may: the defaults.
 * QF_INVALID_ARGUMENT for bad values, QF_MISMATCH for filters that do not fit
 * the layers. */
QF_API qf_status qf_sequence_create(
    const qf_layer* layers,
    size_t count,
    const char* policy,
    const qf_sequence_config* config,
    const qf_filters* filters,
    qf_sequence** out);

QF_API void qf_sequence_free(qf_sequence* sequence); /* twice: undefined */

/* One micro-batch: begin, for each layer append and attend, then commit or
 * rollback. Rows are [batch, kv_heads, tokens, dim] in the dtype of the
 * sequence and are borrowed until commit or rollback. QF_INVALID_ARGUMENT out
 * of this order, QF_SHAPE, and of commit QF_MEMORY_LIMIT: the micro-batch is
 * still open then. Rollback without a micro-batch does nothing. */
QF_API qf_status qf_sequence_begin(qf_sequence* sequence, size_t tokens);
QF_API qf_status qf_sequence_append(
    qf_sequence* sequence,
    size_t layer,
    const qf_tensor* keys,
    const qf_tensor* values);
QF_API qf_status qf_sequence_attend(
    const qf_sequence* sequence,
    size_t layer,
    const qf_tensor* queries,
    const qf_attention* options,
    const qf_output* out);
QF_API qf_status qf_sequence_commit(qf_sequence* sequence);
QF_API qf_status qf_sequence_rollback(qf_sequence* sequence);

/* Forgets everything but the policy. */
QF_API qf_status qf_sequence_clear(qf_sequence* sequence);

/* The rows stored for one group (batch * kv_heads + head) of a layer: original
 * positions, scores, keys [rows, key_dim], values [rows, value_dim] in the
 * dtype of the sequence. QF_INVALID_ARGUMENT for a layer or group that does not
 * exist. */
QF_API qf_status qf_sequence_positions(
    const qf_sequence* sequence,
    size_t layer,
    size_t group,
    int32_t* out,
    size_t capacity,
    size_t* size);
QF_API qf_status qf_sequence_scores(
    const qf_sequence* sequence,
    size_t layer,
    size_t group,
    float* out,
    size_t capacity,
    size_t* size);
QF_API qf_status qf_sequence_keys(
    const qf_sequence* sequence,
    size_t layer,
    size_t group,
    uint16_t* out,
    size_t capacity,
    size_t* size);
QF_API qf_status qf_sequence_values(
    const qf_sequence* sequence,
    size_t layer,
    size_t group,
    uint16_t* out,
    size_t capacity,
    size_t* size);

/* Counters; bytes count keys and values in whole blocks. */
typedef struct qf_sequence_stats {
  size_t tokens; /* committed: true position of the next one */
  size_t rows_min;
  size_t rows_max;
  double rows_mean;
  size_t kv_bytes;
  size_t kv_bytes_peak;
  size_t kv_bytes_full; /* if every row were kept, without rounding */
  uint64_t evictions;   /* commits that evicted */
  uint64_t rows_evicted;
  uint64_t non_finite_scores;
} qf_sequence_stats;

QF_API qf_status qf_sequence_get_stats(
    const qf_sequence* sequence, qf_sequence_stats* out, size_t struct_size);

/* As for a qf_cache; in a sequence of the same layers, dtype, row format,
 * policy and filters, and QF_INVALID_ARGUMENT while a micro-batch is open.
 * Restoring needs room for old and new rows within byte_limit, else
 * QF_MEMORY_LIMIT, and kv_bytes_peak shows both; qf_sequence_clear() first
 * makes room. */
QF_API qf_status qf_sequence_save(
    const qf_sequence* sequence, void* out, size_t capacity, size_t* size);
QF_API qf_status
qf_sequence_restore(qf_sequence* sequence, const void* saved, size_t size);

#ifdef __cplusplus
} /* extern "C" */
#endif

/* NOLINTEND(modernize-*,readability-identifier-naming) */

#endif /* QFILTERS_C_API_H */
