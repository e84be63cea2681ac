#include "llama/gguf_facts.h"

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <memory>
#include <string_view>
#include <system_error>

#include <gguf.h>

#include "qfilters/error.h"

#include "llama/runtime.h"

namespace qfilters::llama {
namespace {

struct GgufDeleter {
  void operator()(gguf_context* context) const noexcept { gguf_free(context); }
};

using GgufHandle = std::unique_ptr<gguf_context, GgufDeleter>;

[[noreturn]] void fail(const std::string& reason) {
  throw Error(ErrorKind::kFile, reason);
}

// llama.cpp's message for a file that is no GGUF at all helps nobody.
void check_magic(const std::filesystem::path& path) {
  std::error_code code;
  const std::filesystem::file_status status =
      std::filesystem::status(path, code);
  if (status.type() == std::filesystem::file_type::not_found) {
    fail("no such file");
  }
  if (code) fail(code.message());
  if (std::filesystem::is_directory(status)) fail("is a directory");
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(std::strerror(errno));
  std::array<char, 4> magic = {};
  file.read(magic.data(), magic.size());
  const std::string_view read(
      magic.data(), static_cast<std::size_t>(file.gcount()));
  if (read.empty()) fail("the file is empty");
  if (read != std::string_view(GGUF_MAGIC)) {
    fail("not a GGUF file (it does not start with \"GGUF\")");
  }
}

std::string text_value(const gguf_context& gguf, const std::string& key) {
  const std::int64_t id = gguf_find_key(&gguf, key.c_str());
  if (id < 0 || gguf_get_kv_type(&gguf, id) != GGUF_TYPE_STRING) return {};
  return gguf_get_val_str(&gguf, id);
}

double float_value(const gguf_context& gguf, const std::string& key) {
  const std::int64_t id = gguf_find_key(&gguf, key.c_str());
  if (id < 0 || gguf_get_kv_type(&gguf, id) != GGUF_TYPE_FLOAT32) return 0;
  return static_cast<double>(gguf_get_val_f32(&gguf, id));
}

// `missing` when the file has no such number.
std::uint32_t count_value(
    const gguf_context& gguf, const std::string& key, std::uint32_t missing) {
  const std::int64_t id = gguf_find_key(&gguf, key.c_str());
  if (id < 0 || gguf_get_kv_type(&gguf, id) != GGUF_TYPE_UINT32) return missing;
  return gguf_get_val_u32(&gguf, id);
}

// Damage that llama.cpp would answer with abort() instead of an error.
void check_numbers(const gguf_context& gguf, const std::string& prefix) {
  constexpr std::uint32_t kMaxLayers = 512;  // as in llama.cpp
  constexpr std::uint32_t kMaxExperts = 1024;
  const auto implausible = [](const std::string& key, const auto& value) {
    fail("damaged GGUF header: " + key + "=" + std::to_string(value));
  };
  const std::string blocks = prefix + "block_count";
  const std::uint32_t layers = count_value(gguf, blocks, 1);
  if (layers == 0 || layers > kMaxLayers) implausible(blocks, layers);

  const std::string all = prefix + "expert_count";
  const std::string used = prefix + "expert_used_count";
  const std::uint32_t experts = count_value(gguf, all, 0);
  const std::uint32_t chosen = count_value(gguf, used, experts > 0 ? 1 : 0);
  if (experts > kMaxExperts) implausible(all, experts);
  if (chosen > experts || (chosen == 0) != (experts == 0)) {
    implausible(used, chosen);
  }
  for (const char* name :
       {"attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"}) {
    const double epsilon = float_value(gguf, prefix + name);
    if (!(epsilon >= 0)) implausible(prefix + name, epsilon);
  }
}

bool has_rope_factors(const gguf_context& gguf) {
  const std::int64_t tensors = gguf_get_n_tensors(&gguf);
  for (std::int64_t i = 0; i < tensors; ++i) {
    const std::string_view name = gguf_get_tensor_name(&gguf, i);
    if (name.find("rope_factors_long") != std::string_view::npos ||
        name.find("rope_factors_short") != std::string_view::npos) {
      return true;
    }
  }
  return false;
}

// The tensor that divides frequencies, if it is there.
std::vector<float> rope_factors(
    const gguf_context& gguf, const std::filesystem::path& path) {
  const std::int64_t id = gguf_find_tensor(&gguf, "rope_freqs.weight");
  if (id < 0 || gguf_get_tensor_type(&gguf, id) != GGML_TYPE_F32) return {};
  std::vector<float> factors(gguf_get_tensor_size(&gguf, id) / sizeof(float));
  std::ifstream file(path, std::ios::binary);
  file.seekg(static_cast<std::streamoff>(
      gguf_get_data_offset(&gguf) + gguf_get_tensor_offset(&gguf, id)));
  file.read(
      reinterpret_cast<char*>(factors.data()),
      static_cast<std::streamsize>(factors.size() * sizeof(float)));
  if (!file) fail("damaged GGUF file: rope_freqs.weight is cut off");
  return factors;
}

RopeFacts read_rope(
    const gguf_context& gguf,
    const std::string& prefix,
    const std::filesystem::path& path) {
  RopeFacts rope;
  rope.freq_base = float_value(gguf, prefix + "rope.freq_base");
  rope.dimensions = count_value(gguf, prefix + "rope.dimension_count", 0);
  rope.scaling = text_value(gguf, prefix + "rope.scaling.type");
  rope.factors = rope_factors(gguf, path);
  return rope;
}

}  // namespace

GgufFacts read_gguf_facts(const std::filesystem::path& path) {
  check_magic(path);
  init_runtime();
  clear_log_errors();
  const GgufHandle gguf(gguf_init_from_file(
      path.string().c_str(), {/*no_alloc=*/true, /*ctx=*/nullptr}));
  if (gguf == nullptr) {
    fail("damaged GGUF header: " + log_error("no reason given"));
  }
  GgufFacts facts;
  facts.architecture = text_value(*gguf, "general.architecture");
  facts.name = text_value(*gguf, "general.name");
  const std::string prefix = facts.architecture + ".";
  check_numbers(*gguf, prefix);
  facts.rope = read_rope(*gguf, prefix, path);
  facts.context_dependent_rope =
      facts.rope.scaling == "longrope" || has_rope_factors(*gguf);
  for (const char* key :
       {"attention.key_length_mla", "attention.kv_lora_rank"}) {
    facts.latent_attention =
        facts.latent_attention ||
        gguf_find_key(gguf.get(), (prefix + key).c_str()) >= 0;
  }
  return facts;
}

}  // namespace qfilters::llama
