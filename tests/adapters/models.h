#pragma once

// The models the adapter tests run: a real one from the assets, and tiny ones
// with random weights that make_tiny_models.py writes once per version of it.

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

#include "qfilters/error.h"

#include "llama/model.h"
#include "llama/session.h"

namespace qfilters::llama::testing {

inline std::filesystem::path asset(const std::string& name) {
  const char* folder = std::getenv("QFILTERS_ASSETS");
  const std::filesystem::path root =
      folder != nullptr ? folder : QFILTERS_SOURCE_DIR "/assets";
  return root / name;
}

inline std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

/// The folder of the tiny models, or nothing when they cannot be made. Tests
/// run in processes of their own, so the finished folder is renamed into place.
inline std::filesystem::path tiny_models() {
  namespace fs = std::filesystem;
  const fs::path source = QFILTERS_SOURCE_DIR "/tests/adapters";
  const fs::path python = QFILTERS_SOURCE_DIR "/.venv/bin/python";
  const fs::path script = source / "make_tiny_models.py";
  if (!fs::exists(script)) return {};
  const std::size_t version = std::hash<std::string>()(read_file(script));
  fs::path folder = fs::path(QFILTERS_BINARY_DIR) /
                    ("tiny_models_" + std::to_string(version));
  if (fs::exists(folder)) return folder;
  if (!fs::exists(python)) return {};
  const fs::path unfinished = folder.string() + "." + std::to_string(getpid());
  const std::string command = "'" + python.string() + "' '" + script.string() +
                              "' '" + unfinished.string() + "' 2>&1";
  const bool made = std::system(command.c_str()) == 0;
  std::error_code other_was_faster;
  if (made) fs::rename(unfinished, folder, other_was_faster);
  fs::remove_all(unfinished);
  return fs::exists(folder) ? folder : fs::path();
}

/// Base of tests with the real model; skips where the assets are absent.
class RealModelTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::filesystem::path path = asset("smollm2-135m-instruct-q8_0.gguf");
    const std::filesystem::path text = asset("handbook.txt");
    if (!std::filesystem::exists(path) || !std::filesystem::exists(text)) {
      GTEST_SKIP() << "no " << path << " or no " << text
                   << ": run `make assets`";
    }
    model_ = Model::load(path);
    tokens_ = model_->tokenize(read_file(text).substr(0, 20000), true, false);
  }

  [[nodiscard]] std::span<const Token> tokens(std::size_t n) const {
    return std::span<const Token>(tokens_).first(n);
  }

  std::shared_ptr<const Model> model_;
  std::vector<Token> tokens_;
};

/// Loads a tiny model, or returns nothing where they cannot be made.
inline std::shared_ptr<const Model> load_tiny(const std::string& name) {
  const std::filesystem::path folder = tiny_models();
  return folder.empty() ? nullptr : Model::load(folder / (name + ".gguf"));
}

/// Bytes of a text as tokens of a tiny model.
inline std::vector<Token> some_tokens(const Model& model, std::size_t n) {
  std::string text;
  while (text.size() < n) {
    text += "The quick brown fox jumps over a lazy dog. ";
  }
  std::vector<Token> tokens = model.tokenize(text, true, false);
  tokens.resize(n);
  return tokens;
}

inline double log_probability(
    const float* logits, std::size_t vocabulary, Token token) {
  double largest = logits[0];
  for (std::size_t v = 0; v < vocabulary; ++v) {
    largest = std::max(largest, static_cast<double>(logits[v]));
  }
  double sum = 0;
  for (std::size_t v = 0; v < vocabulary; ++v) {
    sum += std::exp(static_cast<double>(logits[v]) - largest);
  }
  return static_cast<double>(logits[token]) - largest - std::log(sum);
}

/// What a session makes of a text.
struct Reading {
  double mean_loss = 0;
  std::vector<float> logits;  ///< of the last tokens, one after another
};

/// Keeps the logits of the last `keep` tokens; 0 keeps all.
inline Reading read_text(
    Session& session, std::span<const Token> tokens, std::size_t keep = 0) {
  const std::size_t vocabulary = session.model().vocabulary();
  Reading reading;
  for (std::size_t done = 0; done < tokens.size();) {
    const std::size_t n = std::min(session.chunk(), tokens.size() - done);
    session.step(tokens.subspan(done, n), Logits::kAll);
    for (std::size_t i = 0; i < n; ++i) {
      const float* logits = session.logits(i);
      if (keep == 0 || tokens.size() - (done + i) <= keep) {
        reading.logits.insert(
            reading.logits.end(), logits, logits + vocabulary);
      }
      if (done + i + 1 == tokens.size()) continue;
      reading.mean_loss -=
          log_probability(logits, vocabulary, tokens[done + i + 1]);
    }
    done += n;
  }
  reading.mean_loss /= static_cast<double>(tokens.size() - 1);
  return reading;
}

/// Root mean square of the difference of two readings' logits.
inline double distance(const Reading& a, const Reading& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.logits.size(); ++i) {
    const double d = static_cast<double>(a.logits[i]) - b.logits[i];
    sum += d * d;
  }
  return std::sqrt(sum / static_cast<double>(a.logits.size()));
}

/// The Error that `call` throws; fails the test when it throws none.
inline Error error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no Error was thrown";
  return {ErrorKind::kRuntime, "nothing"};
}

}  // namespace qfilters::llama::testing
