#include "llama/attention_tap.h"

#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include <ggml-backend.h>
#include <ggml.h>
#include <gtest/gtest.h>

#include "qfilters/error.h"

namespace qfilters::llama {
namespace {

constexpr std::int64_t kDim = 8;
constexpr std::int64_t kCells = 16;
constexpr std::int64_t kKvHeads = 2;
constexpr std::int64_t kHeads = 4;
constexpr std::int64_t kTokens = 3;

/// An attention node over cache tensors, laid out as llama.cpp does.
class AttentionTapTest : public ::testing::Test {
 protected:
  void SetUp() override { build("cache_k_l7", "cache_v_l7"); }

  void TearDown() override { release(); }

  void release() {
    ggml_backend_buffer_free(buffer_);
    ggml_free(context_);
  }

  void build(const char* key_name, const char* value_name) {
    context_ = ggml_init({1 << 16, nullptr, /*no_alloc=*/true});
    ggml_tensor* k = cache(key_name);
    ggml_tensor* v = cache(value_name);
    mask_ = ggml_new_tensor_2d(context_, GGML_TYPE_F16, kCells, kTokens);
    queries_ =
        ggml_new_tensor_3d(context_, GGML_TYPE_F32, kDim, kHeads, kTokens);
    node_ = ggml_flash_attn_ext(
        context_,
        ggml_permute(context_, queries_, 0, 2, 1, 3),
        heads_of(k),
        heads_of(v),
        mask_,
        0.5F,
        0.0F,
        30.0F);
    other_ = ggml_scale(context_, queries_, 2.0F);
    stream_ =
        ggml_new_tensor_2d(context_, GGML_TYPE_F32, kDim * kHeads, kTokens);
    added_ = ggml_scale(
        context_,
        ggml_reshape_2d(context_, node_, kDim * kHeads, kTokens),
        1.0F);
    block_ = ggml_add(context_, added_, stream_);
    ggml_set_name(block_, "ffn_inp-7");
    buffer_ = ggml_backend_alloc_ctx_tensors_from_buft(
        context_, ggml_backend_cpu_buffer_type());
    fill_mask(0, 0);
  }

  ggml_tensor* cache(const char* name) {
    ggml_tensor* tensor =
        ggml_new_tensor_3d(context_, GGML_TYPE_F16, kDim * kKvHeads, kCells, 1);
    ggml_set_name(tensor, name);
    return tensor;
  }

  // [dim, cells, heads]
  ggml_tensor* heads_of(ggml_tensor* tensor) {
    ggml_tensor* view = ggml_view_4d(
        context_,
        tensor,
        kDim,
        kKvHeads,
        kCells,
        1,
        kDim * sizeof(std::uint16_t),
        tensor->nb[1],
        tensor->nb[2],
        0);
    return ggml_permute(context_, view, 0, 2, 1, 3);
  }

  // Token t sees cells shift..t + shift, the last `window` of them.
  void fill_mask(std::int64_t window, std::int64_t shift) {
    auto* row = static_cast<std::uint16_t*>(mask_->data);
    for (std::int64_t t = 0; t < kTokens; ++t, row += kCells) {
      for (std::int64_t cell = 0; cell < kCells; ++cell) {
        const std::int64_t back = t + shift - cell;
        const bool visible =
            cell >= shift && back >= 0 && (window == 0 || back < window);
        row[cell] = visible ? 0x0000 : 0xFC00;
      }
    }
  }

  bool ask(AttentionTap& tap) {
    return AttentionTap::on_node(node_, /*ask=*/true, &tap);
  }

  void done(AttentionTap& tap) {
    AttentionTap::on_node(node_, /*ask=*/false, &tap);
  }

  ggml_context* context_ = nullptr;
  ggml_backend_buffer_t buffer_ = nullptr;
  ggml_tensor* queries_ = nullptr;
  ggml_tensor* mask_ = nullptr;
  ggml_tensor* node_ = nullptr;
  ggml_tensor* other_ = nullptr;
  ggml_tensor* stream_ = nullptr;  // residual, what attention adds, their sum
  ggml_tensor* added_ = nullptr;
  ggml_tensor* block_ = nullptr;
};

TEST_F(AttentionTapTest, AsksForAttentionNodesOnly) {
  AttentionTap tap([](const AttentionNode&) {});
  EXPECT_TRUE(ask(tap));
  EXPECT_FALSE(AttentionTap::on_node(other_, true, &tap));
}

TEST_F(AttentionTapTest, SeesTheResidualStreamOnlyWhenAsked) {
  AttentionTap tap([](const AttentionNode&) {});
  EXPECT_FALSE(AttentionTap::on_node(block_, true, &tap));
  tap.on_blocks([](const BlockNode&) {});
  EXPECT_TRUE(AttentionTap::on_node(block_, true, &tap));
  EXPECT_FALSE(AttentionTap::on_node(other_, true, &tap));
  ggml_set_name(block_, "ffn_inp");
  EXPECT_FALSE(AttentionTap::on_node(block_, true, &tap));
}

TEST_F(AttentionTapTest, TellsTheStreamFromWhatAttentionAddsToIt) {
  const auto fill = [](ggml_tensor& tensor, float value) {
    for (std::int64_t i = 0; i < ggml_nelements(&tensor); ++i)
      static_cast<float*>(tensor.data)[i] = value;
  };
  fill(*stream_, 1);
  fill(*added_, 2);
  fill(*block_, 3);
  std::vector<float> seen;
  AttentionTap tap([](const AttentionNode&) {});
  tap.on_blocks([&](const BlockNode& node) {
    EXPECT_EQ(node.layer, 7);
    EXPECT_EQ(node.before.tokens, 3U);
    EXPECT_EQ(node.after.dim, 32U);
    seen.push_back(*static_cast<const float*>(node.before.row(0, 0, 2)));
    seen.push_back(*static_cast<const float*>(node.after.row(0, 0, 2)));
  });
  const auto visit = [&] {
    ask(tap);
    done(tap);
    AttentionTap::on_node(block_, true, &tap);
    AttentionTap::on_node(block_, false, &tap);
    tap.rethrow();
  };
  visit();
  std::swap(block_->src[0], block_->src[1]);
  visit();
  // ggml may write a sum over either of its parts.
  stream_->data = block_->data;
  visit();
  EXPECT_EQ(seen, (std::vector<float>{1, 3, 1, 3, 1, 3}));
}

TEST_F(AttentionTapTest, RefusesASumThatIsNotOfAttentionAndTheStream) {
  AttentionTap tap([](const AttentionNode&) {});
  tap.on_blocks([](const BlockNode&) { FAIL(); });
  const auto visit = [&] {
    ask(tap);
    done(tap);
    AttentionTap::on_node(block_, true, &tap);
    AttentionTap::on_node(block_, false, &tap);
    EXPECT_THROW(tap.rethrow(), Error);
  };
  block_->src[0] = stream_;
  visit();
  block_->src[0] = block_->src[1] = added_;
  visit();
}

TEST_F(AttentionTapTest, DescribesTheNodeWithoutCopyingAnything) {
  std::vector<AttentionNode> nodes;
  AttentionTap tap([&](const AttentionNode& node) { nodes.push_back(node); });
  ask(tap);
  done(tap);
  tap.rethrow();
  ASSERT_EQ(nodes.size(), 1U);
  const AttentionNode& node = nodes.front();
  EXPECT_EQ(node.layer, 7);
  EXPECT_EQ(node.cache_cells, 16U);
  EXPECT_EQ(node.scale, 0.5F);
  EXPECT_EQ(node.soft_cap, 30.0F);
  EXPECT_EQ(node.max_alibi_bias, 0.0F);
  EXPECT_FALSE(node.has_sinks);
  EXPECT_EQ(node.mask, mask_);

  EXPECT_EQ(node.queries.data, queries_->data);
  EXPECT_EQ(node.queries.dtype, DType::kFloat32);
  EXPECT_EQ(node.queries.heads, 4U);
  EXPECT_EQ(node.queries.tokens, 3U);
  EXPECT_EQ(node.queries.dim, 8U);
  EXPECT_EQ(node.queries.head_stride, kDim);
  EXPECT_EQ(node.queries.token_stride, kDim * kHeads);

  EXPECT_EQ(node.new_keys.dtype, DType::kFloat16);
  EXPECT_EQ(node.new_keys.heads, 2U);
  EXPECT_EQ(node.new_keys.tokens, 3U) << "cells behind the new rows are old";
  EXPECT_EQ(node.new_keys.head_stride, kDim);
  EXPECT_EQ(node.new_keys.token_stride, kDim * kKvHeads);
  EXPECT_NE(node.new_keys.data, node.new_values.data);

  EXPECT_EQ(node.out.data, node_->data);
  EXPECT_EQ(node.out.heads, 4U);
  EXPECT_EQ(node.out.tokens, 3U);
  EXPECT_EQ(node.out.head_stride, kDim);
  EXPECT_EQ(node.out.token_stride, kDim * kHeads);
}

TEST_F(AttentionTapTest, TakesTheOperationAwayWhileGgmlRuns) {
  AttentionTap tap([](const AttentionNode&) {}, /*skip_native=*/true);
  EXPECT_TRUE(ask(tap));
  EXPECT_EQ(node_->op, GGML_OP_NONE);
  done(tap);
  EXPECT_EQ(node_->op, GGML_OP_FLASH_ATTN_EXT);
}

TEST_F(AttentionTapTest, GivesTheOperationBackAfterADecodeThatStopped) {
  AttentionTap tap([](const AttentionNode&) {}, /*skip_native=*/true);
  ask(tap);
  tap.reset();
  EXPECT_EQ(node_->op, GGML_OP_FLASH_ATTN_EXT);
  tap.reset();
  EXPECT_EQ(node_->op, GGML_OP_FLASH_ATTN_EXT);
}

TEST_F(AttentionTapTest, KeepsTheFirstExceptionAndLeavesLaterNodesAlone) {
  int calls = 0;
  AttentionTap tap([&](const AttentionNode&) {
    throw std::runtime_error("call " + std::to_string(++calls));
  });
  for (int i = 0; i < 2; ++i) {
    ask(tap);
    done(tap);
  }
  EXPECT_EQ(calls, 1);
  try {
    tap.rethrow();
    FAIL() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "call 1");
  }
  EXPECT_NO_THROW(tap.rethrow()) << "handed over once";
  done(tap);
  EXPECT_EQ(calls, 2) << "the next decode starts anew";
  tap.reset();
  EXPECT_NO_THROW(tap.rethrow()) << "forgotten";
}

TEST_F(AttentionTapTest, LeavesNumbersWhereNothingWasComputed) {
  AttentionTap tap(
      [](const AttentionNode&) { throw std::runtime_error("no"); },
      /*skip_native=*/true);
  auto* out = static_cast<float*>(node_->data);
  out[5] = 3;
  ask(tap);
  done(tap);
  EXPECT_EQ(out[5], 0);
}

TEST_F(AttentionTapTest, RefusesRowsThatAreNoPlainCache) {
  const std::pair<const char*, const char*> names[] = {
      {"cache_idx_k_l7", "cache_v_l7"},
      {"cache_k_l", "cache_v_l7"},
      {"cache_k_l7x", "cache_v_l7"},
      {"cache_k_l7", "cache_v_l6"},
      {"enc", "enc"},
  };
  for (const auto& [key_name, value_name] : names) {
    SCOPED_TRACE(std::string(key_name) + " and " + value_name);
    release();
    build(key_name, value_name);
    AttentionTap tap([](const AttentionNode&) { FAIL(); });
    ask(tap);
    done(tap);
    EXPECT_THROW(tap.rethrow(), Error);
  }
}

TEST_F(AttentionTapTest, KnowsWhetherTokenIIsCellI) {
  const auto sees = [&](std::size_t window) {
    bool result = false;
    AttentionTap tap([&](const AttentionNode& node) {
      result = sees_own_cells(node, window);
    });
    done(tap);
    tap.rethrow();
    return result;
  };
  fill_mask(0, 0);
  EXPECT_TRUE(sees(0));
  EXPECT_TRUE(sees(3)) << "the window is longer than the text";
  EXPECT_FALSE(sees(2));
  fill_mask(2, 0);
  EXPECT_TRUE(sees(2));
  EXPECT_FALSE(sees(0));
  fill_mask(0, 1);
  EXPECT_FALSE(sees(0)) << "shifted by a cell";
  fill_mask(0, 0);
  static_cast<std::uint16_t*>(mask_->data)[kCells - 1] = 0;
  EXPECT_FALSE(sees(0)) << "sees a cell that is not its own";
  static_cast<std::uint16_t*>(mask_->data)[kCells - 1] = 0xB800;
  EXPECT_FALSE(sees(0)) << "a bias is no mask";
}

}  // namespace
}  // namespace qfilters::llama
