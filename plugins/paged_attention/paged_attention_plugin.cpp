#include "paged_attention/paged_attention_plugin.h"

#include "common/attention_params.h"
#include "common/creator.h"
#include "common/paged_inputs.h"
#include "kernels/smxx_paged_attention.h"
#include "kernels/smxx_paged_decode.h"

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

size_t PagedAttentionPlugin::workspace_bytes(Shapes const& largest) const {
  if (!splits_decode(largest.in_types[kQ], largest.in_types[kKvCache])) return 0;
  auto const q_len = static_cast<int32_t>(largest.in[kDecodeRows].d[1]);
  return kernels::paged_decode_workspace(static_cast<int32_t>(largest.in[kQ].d[1]),
                                         static_cast<int32_t>(kv_heads(largest.in[kKvCache])),
                                         q_len, false);
}

void PagedAttentionPlugin::enqueue_step(Step const& step) const {
  nvinfer1::Dims const& q = step.in[kQ].dims;
  nvinfer1::DataType const cache_type = step.in[kKvCache].type;
  kernels::PagedAttentionParams p{};
  p.tokens = packed_tokens(step, kPacked, q.d[0]);
  p.q = step.inputs[kQ];
  p.kv_cache = step.inputs[kKvCache];
  p.kv_scale = cache_scale(step, cache_type, kKvScale);
  p.out = step.outputs[0];
  p.num_rows = p.tokens.num_tokens;
  p.num_heads = static_cast<int32_t>(q.d[1]);
  p.num_kv_heads = static_cast<int32_t>(step.in[kKvCache].dims.d[3]);
  p.softmax_scale = attributes().softmax_scale;
  p.type = kernel_type(step.in[kQ].type);
  RowSplit const rows = split_rows(step.in[kDecodeRows].dims, p.tokens);
  bool const split = splits_decode(step.in[kQ].type, cache_type) && kernels::has_paged_decode();
  if (split) {
    p.num_rows = rows.context_tokens;
    kernels::PagedDecodeParams const decode = decode_params(
        p, rows, kernels::view_of_pages(p.kv_cache, p.num_kv_heads, kernel_type(cache_type)));
    check_launch(kernels::launch_paged_decode(decode, step.workspace, step.stream), "paged_decode");
  }
  if ((split || rows.num_decode == 0) && cache_type == nvinfer1::DataType::kBF16) {
    kernels::PagedPrefillParams const context{context_rows(p, rows, step.in[kKvCache].dims.d[0])};
    check_launch(launch_paged_prefill(context, step.stream), "paged_prefill");
  } else {
    check_launch(kernels::launch_paged_attention(p, step.stream), "paged_attention");
  }
}

}  // namespace m3

M3_DEFINE_CREATOR(paged_attention, m3::PagedAttentionPlugin)
