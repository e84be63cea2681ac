// Errors, versions, instruction sets and tensors of the C API.
#include "qfilters/c_api.h"

#include <cstdio>
#include <exception>
#include <new>
#include <stdexcept>

#include "qfilters/isa.h"
#include "qfilters/version.h"

#include "c_api/support.h"

namespace qfilters::c_api {

namespace {

// Of fixed size, so that telling of a failure cannot fail.
thread_local char last_error[1024] = "";

qf_status fail(
    const char* function, const char* reason, qf_status status) noexcept {
  std::snprintf(last_error, sizeof(last_error), "%s: %s", function, reason);
  return status;
}

qf_status status_of(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::kInvalidArgument:
      return QF_INVALID_ARGUMENT;
    case ErrorKind::kShape:
      return QF_SHAPE;
    case ErrorKind::kFile:
      return QF_FILE;
    case ErrorKind::kMismatch:
      return QF_MISMATCH;
    case ErrorKind::kUnsupported:
      return QF_UNSUPPORTED;
    case ErrorKind::kMemoryLimit:
      return QF_MEMORY_LIMIT;
    case ErrorKind::kLowRetention:
      return QF_LOW_RETENTION;
    case ErrorKind::kRuntime:
      return QF_RUNTIME;
  }
  return QF_INTERNAL;
}

qf_attention default_attention() {
  const AttentionOptions options;
  return {
      sizeof(qf_attention),
      options.scale,
      options.soft_cap,
      options.window,
      options.threads};
}

// Whether a tensor or an output has an element.
template <typename View>
bool any(const View& view) {
  return view.batch > 0 && view.heads > 0 && view.tokens > 0 && view.dim > 0;
}

OutputView output_of(const qf_output* output) {
  const qf_output& o = deref(output, "out");
  if (any(o)) deref(o.data, "out->data");
  return {
      o.data,
      o.batch,
      o.heads,
      o.tokens,
      o.dim,
      o.batch_stride,
      o.head_stride,
      o.token_stride};
}

}  // namespace

qf_status report(const char* function) noexcept {
  try {
    throw;
  } catch (const Error& error) {
    return fail(function, error.what(), status_of(error.kind()));
  } catch (const std::bad_alloc&) {
    return fail(function, "out of memory", QF_OUT_OF_MEMORY);
  } catch (const std::length_error&) {
    return fail(function, "more than any memory holds", QF_OUT_OF_MEMORY);
  } catch (const std::exception& error) {
    return fail(function, error.what(), QF_INTERNAL);
  } catch (...) {
    return fail(function, "unknown exception", QF_INTERNAL);
  }
}

void reject(const std::string& what) {
  throw Error(ErrorKind::kInvalidArgument, what);
}

DType dtype_of(std::int32_t dtype) {
  switch (dtype) {
    case QF_FLOAT32:
      return DType::kFloat32;
    case QF_FLOAT16:
      return DType::kFloat16;
    case QF_BFLOAT16:
      return DType::kBFloat16;
    default:
      reject("dtype " + std::to_string(dtype) + " is unknown");
  }
}

TensorView view_of(const qf_tensor* tensor, const char* name) {
  const qf_tensor& t = deref(tensor, name);
  if (any(t)) {
    deref(
        static_cast<const std::byte*>(t.data),
        (std::string(name) + "->data").c_str());
  }
  return {
      t.data,
      dtype_of(t.dtype),
      t.batch,
      t.heads,
      t.tokens,
      t.dim,
      t.batch_stride,
      t.head_stride,
      t.token_stride};
}

void attend_to(
    const RowsView& rows,
    const qf_tensor* queries,
    const qf_attention* options,
    const qf_output* out) {
  const TensorView q = view_of(queries, "queries");
  const qf_attention o = read_struct(options, default_attention());
  attend(q, rows, {o.scale, o.soft_cap, o.window, o.threads}, output_of(out));
}

}  // namespace qfilters::c_api

namespace c_api = qfilters::c_api;

const char* qf_last_error(void) {
  return c_api::last_error;
}

const char* qf_version(void) {
  return qfilters::kVersion;
}

qf_status qf_active_isa(char* out, size_t capacity, size_t* size) {
  return c_api::guard(__func__, [&] {
    c_api::copy_text(qfilters::active_isa(), out, capacity, size);
  });
}

qf_status qf_runnable_isas(char* out, size_t capacity, size_t* size) {
  return c_api::guard(__func__, [&] {
    std::string list;
    for (const std::string& name : qfilters::runnable_isas()) {
      list += (list.empty() ? "" : ",") + name;
    }
    c_api::copy_text(list, out, capacity, size);
  });
}

qf_status qf_set_isa(const char* name) {
  return c_api::guard(
      __func__, [&] { qfilters::set_isa(&c_api::deref(name, "name")); });
}

qf_tensor qf_tensor_dense(
    const void* data,
    int32_t dtype,
    size_t batch,
    size_t heads,
    size_t tokens,
    size_t dim) {
  // The type is checked where the tensor is used.
  const auto view = qfilters::TensorView::dense(
      data, qfilters::DType::kFloat32, batch, heads, tokens, dim);
  return {
      data,
      dtype,
      batch,
      heads,
      tokens,
      dim,
      view.batch_stride,
      view.head_stride,
      view.token_stride};
}

qf_output qf_output_dense(
    float* data, size_t batch, size_t heads, size_t tokens, size_t dim) {
  const auto view =
      qfilters::OutputView::dense(data, batch, heads, tokens, dim);
  return {
      data,
      batch,
      heads,
      tokens,
      dim,
      view.batch_stride,
      view.head_stride,
      view.token_stride};
}

qf_status qf_attention_init(qf_attention* options, size_t struct_size) {
  return c_api::guard(__func__, [&] {
    c_api::write_struct(
        options, "options", struct_size, c_api::default_attention());
  });
}
