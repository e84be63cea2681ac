#include "llama/rope.h"

#include <cmath>
#include <cstddef>
#include <string>

#include <llama.h>

#include "qfilters/error.h"

namespace qfilters::llama {
namespace {

[[noreturn]] void refuse(const Model& model, const std::string& reason) {
  throw Error(
      ErrorKind::kUnsupported,
      "expected: the RoPE of " + model.name() +
          " is not understood: " + reason);
}

Rotation no_rotation(std::size_t dim) {
  Rotation out;
  for (std::size_t d = 0; d < dim; ++d) {
    out.angle.push_back(0);
    out.partner.push_back(d);
  }
  return out;
}

// Pairs of neighbours (2i, 2i + 1), or of halves (i, i + rotated / 2).
Rotation rotation_of(
    const RopeFacts& rope, double scale, bool halves, std::size_t dim) {
  const std::size_t rotated = rope.dimensions == 0 ? dim : rope.dimensions;
  const double base = rope.freq_base > 0 ? rope.freq_base : 10000.0;
  Rotation out = no_rotation(dim);
  for (std::size_t i = 0; i < rotated / 2; ++i) {
    const double power =
        -2.0 * static_cast<double>(i) / static_cast<double>(rotated);
    double angle = scale * std::pow(base, power);
    if (!rope.factors.empty()) angle /= static_cast<double>(rope.factors[i]);
    const std::size_t a = halves ? i : 2 * i;
    const std::size_t b = halves ? i + rotated / 2 : 2 * i + 1;
    out.angle[a] = static_cast<float>(-angle);
    out.angle[b] = static_cast<float>(angle);
    out.partner[a] = b;
    out.partner[b] = a;
  }
  return out;
}

void check(const Model& model, std::size_t dim) {
  const RopeFacts& rope = model.rope();
  const std::size_t rotated = rope.dimensions == 0 ? dim : rope.dimensions;
  if (rotated > dim || rotated % 2 != 0) {
    refuse(
        model,
        std::to_string(rotated) + " of " + std::to_string(dim) +
            " dimensions turn");
  }
  if (!rope.factors.empty() && rope.factors.size() != rotated / 2) {
    refuse(
        model,
        std::to_string(rope.factors.size()) + " factors for " +
            std::to_string(rotated / 2) + " pairs");
  }
}

}  // namespace

std::vector<Rotation> rotations_of(const Model& model) {
  const RopeFacts& rope = model.rope();
  const llama_rope_type type = llama_model_rope_type(model.handle());
  if (type != LLAMA_ROPE_TYPE_NORM && type != LLAMA_ROPE_TYPE_NEOX) {
    refuse(model, "type " + std::to_string(static_cast<int>(type)));
  }
  if (rope.scaling != "none" && rope.scaling != "linear" &&
      !rope.scaling.empty()) {
    refuse(model, "scaling '" + rope.scaling + "'");
  }
  const double scale =
      rope.scaling == "none"
          ? 1.0
          : static_cast<double>(
                llama_model_rope_freq_scale_train(model.handle()));
  std::vector<Rotation> out;
  for (const AttentionLayer& layer : model.layers()) {
    if (layer.window != 0) {
      out.push_back(no_rotation(layer.key_dim));
      continue;
    }
    check(model, layer.key_dim);
    out.push_back(
        rotation_of(rope, scale, type == LLAMA_ROPE_TYPE_NEOX, layer.key_dim));
  }
  return out;
}

}  // namespace qfilters::llama
