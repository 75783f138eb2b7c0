#include "sparse_attention/sparse_attention_plugin.h"

#include "common/creator.h"
#include "common/paged_inputs.h"
#include "kernels/smxx_sparse_attention.h"

namespace m3 {

using nvinfer1::Dims;

namespace {

enum Input : int32_t {
  kQ,
  kKvCache,
  kBlockIds,
  kPacked,
  kDecodeRows = kPacked + kPackedInputs,
  kKvScale,
};

}  // namespace

void SparseAttentionPlugin::check_attributes() const {
  check_is_128(attributes().block_size, kName, "block_size");
}

TypeTable SparseAttentionPlugin::types(int32_t num_inputs) const {
  return PortTypes{{"q", "kv_cache", "block_ids", kPackedPorts[0], kPackedPorts[1], kPackedPorts[2],
                    "decode_rows"},
                   "TKiiiii",
                   {"out"},
                   "T"}
      .table(num_inputs);
}

void SparseAttentionPlugin::output_shapes(nvinfer1::DimsExprs const* in, nvinfer1::DimsExprs* out,
                                          nvinfer1::IExprBuilder& builder) const {
  out[0] = attention_output(in[kQ], builder);
}

void SparseAttentionPlugin::check_shapes(Shapes const& shapes) const {
  Dims const& q = shapes.in[kQ];
  Dims const& kv_cache = shapes.in[kKvCache];
  Dims const& block_ids = shapes.in[kBlockIds];
  check_attention_heads(q, kv_cache);
  M3_CHECK(
      block_ids.nbDims == 3 && block_ids.d[0] == kv_heads(kv_cache) && block_ids.d[1] == q.d[0],
      "block_ids has shape %s; q %s and kv_cache %s take [KV heads, tokens, top_k]",
      to_string(block_ids).c_str(), to_string(q).c_str(), to_string(kv_cache).c_str());
  check_packed(shapes, kPacked);
  check_decode_rows(shapes.in[kDecodeRows]);
  if (shapes.in.size() > kKvScale) check_vector(shapes.in[kKvScale], 1, "kv_scale");
}

void SparseAttentionPlugin::enqueue_step(Step const& step) const {
  Dims const& q = step.in[kQ].dims;
  kernels::SparseAttentionParams p{};
  p.tokens = packed_tokens(step, kPacked, q.d[0]);
  p.q = step.inputs[kQ];
  p.kv_cache = step.inputs[kKvCache];
  p.kv_scale = cache_scale(step, step.in[kKvCache].type, kKvScale);
  p.block_ids = step.input<int32_t>(kBlockIds);
  p.out = step.outputs[0];
  p.num_heads = static_cast<int32_t>(q.d[1]);
  p.num_kv_heads = static_cast<int32_t>(step.in[kKvCache].dims.d[3]);
  p.top_k = static_cast<int32_t>(step.in[kBlockIds].dims.d[2]);
  p.softmax_scale = attributes().softmax_scale;
  p.type = kernel_type(step.in[kQ].type);
  check_launch(kernels::launch_sparse_attention(p, step.stream), "sparse_attention");
}

}  // namespace m3

M3_DEFINE_CREATOR(sparse_attention, m3::SparseAttentionPlugin)
