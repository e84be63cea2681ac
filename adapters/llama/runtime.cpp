#include "llama/runtime.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <llama.h>

#include "qfilters/error.h"

namespace qfilters::llama {
namespace {

// Longer micro-batches only cost memory: their scores are quadratic.
constexpr std::size_t kMaxChunk = 1 << 16;
constexpr int kMaxThreads = 1024;
constexpr std::size_t kErrorsKept = 8;

std::mutex handler_mutex;
std::shared_ptr<const LogHandler> handler;  // guarded by handler_mutex

// llama.cpp logs on the thread that called it, so errors of one call cannot
// mix with those of another.
struct ThreadLog {
  std::string line;
  int level = 0;
  std::vector<std::string> errors;
};

thread_local ThreadLog thread_log;

void end_line(ThreadLog& log) {
  const std::string line = std::exchange(log.line, {});
  if (log.level == GGML_LOG_LEVEL_ERROR && !line.empty()) {
    if (log.errors.size() == kErrorsKept) log.errors.erase(log.errors.begin());
    log.errors.push_back(line);
  }
  std::shared_ptr<const LogHandler> target;
  {
    const std::lock_guard lock(handler_mutex);
    target = handler;
  }
  if (target != nullptr) (*target)(log.level, line);
}

void on_log(ggml_log_level level, const char* text, void* /*data*/) noexcept {
  try {
    ThreadLog& log = thread_log;
    if (level != GGML_LOG_LEVEL_CONT) log.level = level;
    for (const char c : std::string_view(text)) {
      if (c == '\n') {
        end_line(log);
      } else {
        log.line.push_back(c);
      }
    }
  } catch (...) {
    // A log line is not worth a crash inside llama.cpp.
    thread_log.line.clear();
  }
}

std::atomic<AbortHandler> abort_handler = nullptr;
std::atomic<int> models_loading = 0;

void on_abort(const char* reason) {
  const AbortHandler target = abort_handler;
  if (target != nullptr) target(reason, models_loading > 0);
}

std::string without_function(const std::string& line) {
  constexpr std::string_view kLoading = "error loading model: ";
  const std::size_t loading = line.find(kLoading);
  if (loading != std::string::npos) {
    return line.substr(loading + kLoading.size());
  }
  const std::size_t colon = line.find(": ");
  if (colon == std::string::npos || line.find(' ') < colon) return line;
  return line.substr(colon + 2);
}

}  // namespace

void ContextDeleter::operator()(llama_context* context) const noexcept {
  llama_free(context);
}

void ModelDeleter::operator()(llama_model* model) const noexcept {
  llama_model_free(model);
}

void init_runtime() {
  static std::once_flag once;
  std::call_once(once, [] {
    llama_log_set(on_log, nullptr);
    ggml_set_abort_callback(on_abort);
    llama_backend_init();
    // Builds with loadable backends register none by themselves.
    if (ggml_backend_reg_count() == 0) ggml_backend_load_all();
  });
}

void set_abort_handler(AbortHandler handler_or_none) noexcept {
  abort_handler = handler_or_none;
}

LoadingScope::LoadingScope() noexcept {
  ++models_loading;
}

LoadingScope::~LoadingScope() {
  --models_loading;
}

void set_log_handler(LogHandler new_handler) {
  init_runtime();
  auto shared =
      new_handler == nullptr
          ? nullptr
          : std::make_shared<const LogHandler>(std::move(new_handler));
  const std::lock_guard lock(handler_mutex);
  handler.swap(shared);
}

void clear_log_errors() {
  thread_log.errors.clear();
}

std::string log_error(std::string_view fallback) {
  const std::vector<std::string>& errors = thread_log.errors;
  // The very last line often only says what failed, not why.
  const auto explains = [](const std::string& line) {
    return !line.ends_with("failed to load model") &&
           line.find("failed to decode, ret =") == std::string::npos;
  };
  const auto found = std::find_if(errors.rbegin(), errors.rend(), explains);
  return found == errors.rend() ? std::string(fallback)
                                : without_function(*found);
}

ContextHandle make_context(llama_model& model, const ContextSpec& spec) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<std::uint32_t>(spec.cells);
  params.n_batch = static_cast<std::uint32_t>(spec.chunk);
  params.n_ubatch = params.n_batch;
  params.n_seq_max = 1;
  params.n_threads = spec.threads;
  params.n_threads_batch = spec.threads;
  params.flash_attn_type = spec.flash_attention
                               ? LLAMA_FLASH_ATTN_TYPE_ENABLED
                               : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  params.type_k = spec.cache_type;
  params.type_v = spec.cache_type;
  params.cb_eval = spec.callback;
  params.cb_eval_user_data = spec.callback_data;
  params.offload_kqv = false;
  params.op_offload = false;
  params.swa_full = spec.full_windows;
  params.no_perf = true;
  clear_log_errors();
  ContextHandle context(llama_init_from_model(&model, params));
  if (context == nullptr) {
    throw Error(
        ErrorKind::kRuntime,
        "llama.cpp cannot create a context: " + log_error("no reason given"));
  }
  return context;
}

int decode(
    llama_context& context,
    std::span<const Token> tokens,
    std::size_t position,
    Logits logits) {
  const std::size_t n = tokens.size();
  std::vector<Token> ids(tokens.begin(), tokens.end());
  std::vector<llama_pos> positions(n);
  for (std::size_t i = 0; i < n; ++i) {
    positions[i] = static_cast<llama_pos>(position + i);
  }
  std::vector<std::int8_t> wanted(n, logits == Logits::kAll ? 1 : 0);
  if (logits == Logits::kLast) wanted.back() = 1;

  llama_batch batch = {};
  batch.n_tokens = static_cast<std::int32_t>(n);
  batch.token = ids.data();
  batch.pos = positions.data();
  batch.logits = wanted.data();
  clear_log_errors();
  try {
    const int code = llama_decode(&context, batch);
    llama_synchronize(&context);
    return code;
  } catch (const std::exception& error) {
    throw Error(
        ErrorKind::kRuntime,
        std::string("llama_decode failed: ") + error.what());
  }
}

void check_decode(std::string_view operation, int code) {
  if (code == 0) return;
  throw Error(
      ErrorKind::kRuntime,
      std::string(operation) + ": llama_decode returned " +
          std::to_string(code) + ": " + log_error("no reason given"));
}

void check_tokens(
    std::string_view operation,
    const Model& model,
    std::span<const Token> tokens,
    std::size_t chunk) {
  const auto fail = [&](const std::string& what) {
    throw Error(
        ErrorKind::kInvalidArgument, std::string(operation) + ": " + what);
  };
  if (tokens.empty() || tokens.size() > chunk) {
    fail(
        "tokens=" + std::to_string(tokens.size()) +
        " is not in [1, chunk=" + std::to_string(chunk) + "]");
  }
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const Token token = tokens[i];
    if (token < 0 || static_cast<std::size_t>(token) >= model.vocabulary()) {
      fail(
          "token " + std::to_string(token) + " at index " + std::to_string(i) +
          " is outside the vocabulary of " +
          std::to_string(model.vocabulary()));
    }
  }
}

void check_options(std::string_view operation, const SessionOptions& options) {
  const auto check = [&](const char* name, std::size_t value, std::size_t max) {
    if (value >= 1 && value <= max) return;
    throw Error(
        ErrorKind::kInvalidArgument,
        std::string(operation) + ": " + name + "=" + std::to_string(value) +
            " is not in [1, " + std::to_string(max) + "]");
  };
  check("chunk", options.chunk, kMaxChunk);
  const int threads = std::max(options.threads, 0);
  check("threads", static_cast<std::size_t>(threads), kMaxThreads);
}

LogitsRange LogitsRange::of(Logits logits, std::size_t tokens) noexcept {
  if (logits == Logits::kNone) return {};
  return {logits == Logits::kAll ? 0 : tokens - 1, tokens};
}

const float* logits_at(
    std::string_view operation,
    llama_context& context,
    const LogitsRange& range,
    std::size_t i) {
  if (i < range.begin || i >= range.end) {
    throw Error(
        ErrorKind::kInvalidArgument,
        std::string(operation) + ": i=" + std::to_string(i) + " is not in [" +
            std::to_string(range.begin) + ", " + std::to_string(range.end) +
            ") of the last step");
  }
  return llama_get_logits_ith(&context, static_cast<std::int32_t>(i));
}

}  // namespace qfilters::llama
