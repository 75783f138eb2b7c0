#include "paged_attention/paged_attention_plugin.h"

#include "common/creator.h"
#include "common/paged_inputs.h"
#include "kernels/smxx_paged_attention.h"

namespace m3 {

namespace {

enum Input : int32_t {
  kQ,
  kKvCache,
  kPacked,
  kDecodeRows = kPacked + kPackedInputs,
  kKvScale,
};

}  // namespace

void PagedAttentionPlugin::check_attributes() const {
  check_is_128(attributes().block_size, kName, "block_size");
}

TypeTable PagedAttentionPlugin::types(int32_t num_inputs) const {
  return PortTypes{
      {"q", "kv_cache", kPackedPorts[0], kPackedPorts[1], kPackedPorts[2], "decode_rows"},
      "TKiiii",
      {"out"},
      "T"}
      .table(num_inputs);
}

void PagedAttentionPlugin::output_shapes(nvinfer1::DimsExprs const* in, nvinfer1::DimsExprs* out,
                                         nvinfer1::IExprBuilder& builder) const {
  out[0] = attention_output(in[kQ], builder);
}

void PagedAttentionPlugin::check_shapes(Shapes const& shapes) const {
  check_attention_heads(shapes.in[kQ], shapes.in[kKvCache]);
  check_packed(shapes, kPacked);
  check_decode_rows(shapes.in[kDecodeRows]);
  if (shapes.in.size() > kKvScale) check_vector(shapes.in[kKvScale], 1, "kv_scale");
}

void PagedAttentionPlugin::enqueue_step(Step const& step) const {
  nvinfer1::Dims const& q = step.in[kQ].dims;
  kernels::PagedAttentionParams p{};
  p.tokens = packed_tokens(step, kPacked, q.d[0]);
  p.q = step.inputs[kQ];
  p.kv_cache = step.inputs[kKvCache];
  p.kv_scale = cache_scale(step, step.in[kKvCache].type, kKvScale);
  p.out = step.outputs[0];
  p.num_heads = static_cast<int32_t>(q.d[1]);
  p.num_kv_heads = static_cast<int32_t>(step.in[kKvCache].dims.d[3]);
  p.softmax_scale = attributes().softmax_scale;
  p.type = kernel_type(step.in[kQ].type);
  check_launch(kernels::launch_paged_attention(p, step.stream), "paged_attention");
}

}  // namespace m3

M3_DEFINE_CREATOR(paged_attention, m3::PagedAttentionPlugin)
