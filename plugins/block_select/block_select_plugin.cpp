#include "block_select/block_select_plugin.h"

#include <algorithm>

#include "common/creator.h"
#include "common/paged_inputs.h"
#include "kernels/prefill_select.h"
#include "kernels/smxx_block_select.h"
#include "kernels/smxx_decode_select.h"

namespace m3 {

using kernels::kHeadSize;
using nvinfer1::Dims;

namespace {

enum Input : int32_t {
  kIndexQ,
  kIndexCache,
  kPacked,
  kDecodeRows = kPacked + kPackedInputs,
  kIndexScale,
};

cudaError_t launch_context(kernels::BlockSelectParams const& p, void* workspace,
                           cudaStream_t stream) {
#ifdef M3_SM90
  if (kernels::has_sm90_prefill_select(p)) {
    return kernels::launch_sm90_prefill_select(p, workspace, stream);
  }
#endif
  return kernels::has_prefill_select(p.type, p.num_index_heads)
             ? kernels::launch_smxx_prefill_select(p, workspace, stream)
             : kernels::launch_block_select_context(p, workspace, stream);
}

cudaError_t launch(kernels::BlockSelectParams const& p, void* workspace, cudaStream_t stream) {
  // Decode rows last, so that the attention behind may start while they are selected.
  auto const error = launch_context(p, workspace, stream);
  if (error != cudaSuccess) return error;
  return p.type == kernels::Type::kBfloat16
             ? kernels::launch_decode_select(p, workspace, stream)
             : kernels::launch_block_select_decode(p, workspace, stream);
}

}  // namespace

void BlockSelectPlugin::check_attributes() const {
  auto const& a = attributes();
  check_is_128(a.block_size, kName, "block_size");
  M3_CHECK(a.top_k <= kernels::kMaxTopK, "%s: attribute 'top_k' is %d; it takes at most %d", kName,
           a.top_k, kernels::kMaxTopK);
  M3_CHECK(a.init_blocks <= a.top_k && a.local_blocks <= a.top_k - a.init_blocks,
           "%s: attributes 'init_blocks' %d and 'local_blocks' %d are always taken; together they "
           "must not exceed top_k, %d",
           kName, a.init_blocks, a.local_blocks, a.top_k);
}

TypeTable BlockSelectPlugin::types(int32_t num_inputs) const {
  return PortTypes{
      {"index_q", "index_cache", kPackedPorts[0], kPackedPorts[1], kPackedPorts[2], "decode_rows"},
      "TXiiii",
      {"block_ids"},
      "i"}
      .table(num_inputs);
}

void BlockSelectPlugin::output_shapes(nvinfer1::DimsExprs const* in, nvinfer1::DimsExprs* out,
                                      nvinfer1::IExprBuilder& builder) const {
  M3_CHECK(in[kIndexQ].nbDims == 3, "index_q has %d dimensions; it takes 3", in[kIndexQ].nbDims);
  out[0].nbDims = 3;
  out[0].d[0] = in[kIndexQ].d[1];
  out[0].d[1] = in[kIndexQ].d[0];
  out[0].d[2] = builder.constant(attributes().top_k);
}

void BlockSelectPlugin::check_shapes(Shapes const& shapes) const {
  Dims const& q = shapes.in[kIndexQ];
  M3_CHECK(q.nbDims == 3 && q.d[1] >= 1 && q.d[1] <= kernels::kMaxIndexHeads && q.d[2] == kHeadSize,
           "index_q has shape %s; it takes [tokens, 1 to %d heads, %d]", to_string(q).c_str(),
           kernels::kMaxIndexHeads, kHeadSize);
  check_index_cache(shapes.in[kIndexCache]);
  check_packed(shapes, kPacked);
  check_decode_rows(shapes.in[kDecodeRows]);
  if (shapes.in.size() > kIndexScale) check_vector(shapes.in[kIndexScale], 1, "index_scale");
}

size_t BlockSelectPlugin::workspace_bytes(Shapes const& largest) const {
  Dims const& q = largest.in[kIndexQ];
  Dims const& decode_rows = largest.in[kDecodeRows];
  int64_t const max_pages = largest.in[kPacked + 2].d[1];
  return std::max({kernels::block_select_workspace_bytes(q.d[0], q.d[1], max_pages),
                   kernels::prefill_select_workspace_bytes(q.d[0], q.d[1], max_pages),
                   kernels::decode_select_workspace_bytes(decode_rows.d[0], decode_rows.d[1],
                                                          q.d[1], max_pages)});
}

void BlockSelectPlugin::enqueue_step(Step const& step) const {
  Dims const& q = step.in[kIndexQ].dims;
  auto const& a = attributes();

  kernels::BlockSelectParams p{};
  p.tokens = packed_tokens(step, kPacked, q.d[0]);
  p.index_q = step.inputs[kIndexQ];
  p.index_cache = step.inputs[kIndexCache];
  p.index_scale = cache_scale(step, step.in[kIndexCache].type, kIndexScale);
  p.block_ids = step.output<int32_t>(0);
  p.num_index_heads = static_cast<int32_t>(q.d[1]);
  RowSplit const rows = split_rows(step.in[kDecodeRows].dims, p.tokens);
  p.num_decode_requests = rows.num_decode;
  p.decode_length = rows.q_len;
  p.top_k = a.top_k;
  p.init_blocks = a.init_blocks;
  p.local_blocks = a.local_blocks;
  p.num_pages = static_cast<int32_t>(step.in[kIndexCache].dims.d[0]);
  p.type = kernel_type(step.in[kIndexQ].type);
  check_launch(launch(p, step.workspace, step.stream), "block_select");
}

}  // namespace m3

M3_DEFINE_CREATOR(block_select, m3::BlockSelectPlugin)
