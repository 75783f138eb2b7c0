#include "sparse_attention/sparse_attention_plugin.h"

#include <algorithm>

#include "common/attention_params.h"
#include "common/creator.h"
#include "common/paged_inputs.h"
#include "kernels/smxx_paged_decode.h"
#include "kernels/smxx_selected_decode.h"
#include "kernels/smxx_sparse_attention.h"
#include "kernels/sparse_prefill.h"

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

bool splits_decode(nvinfer1::DataType q, nvinfer1::DataType kv_cache, Dims const& block_ids) {
  return m3::splits_decode(q, kv_cache) && block_ids.d[2] >= 1 &&
         block_ids.d[2] <= kernels::kMaxSelectedBlocks;
}

// Whether the block-major kernels serve the context rows; `requests` of them at most.
bool inverts_blocks(nvinfer1::DataType q_type, Dims const& q, Dims const& kv_cache,
                    Dims const& block_ids, int64_t requests) {
  return q_type == nvinfer1::DataType::kBF16 &&
         kernels::takes_sparse_prefill(static_cast<int32_t>(q.d[1]), kv_heads(kv_cache),
                                       static_cast<int32_t>(requests),
                                       static_cast<int32_t>(block_ids.d[2]));
}

// Whether the dense kernels take the rows.
bool sees_dense(nvinfer1::DataType q, nvinfer1::DataType kv_cache, int32_t top_k) {
  return q == nvinfer1::DataType::kBF16 && kv_cache == nvinfer1::DataType::kBF16 && top_k <= 32;
}

cudaError_t launch_prefill(kernels::SparsePrefillParams const& p, void* workspace,
                           cudaStream_t stream) {
  kernels::SparsePrefillRounds const rounds =
      kernels::sparse_prefill_rounds(p.num_tokens, p.num_heads, p.num_kv_heads, p.top_k);
#ifdef M3_SM90
  // TMA describes no empty cache.
  if (p.kv_scale == nullptr && p.num_pages > 0 && kernels::has_sm90_sparse_prefill()) {
    return kernels::launch_sm90_sparse_prefill(p, rounds, workspace, stream);
  }
#endif
  return kernels::launch_smxx_sparse_prefill(p, rounds, workspace, stream);
}

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

size_t SparseAttentionPlugin::workspace_bytes(Shapes const& largest) const {
  Dims const& q = largest.in[kQ];
  Dims const& block_ids = largest.in[kBlockIds];
  Dims const& table = largest.in[kPacked + 2];
  auto const heads = static_cast<int32_t>(q.d[1]);
  auto const num_kv_heads = static_cast<int32_t>(kv_heads(largest.in[kKvCache]));
  size_t bytes = 0;
  if (splits_decode(largest.in_types[kQ], largest.in_types[kKvCache], block_ids)) {
    bytes = kernels::paged_decode_workspace(heads, num_kv_heads, 1, true);
  }
  // Too many requests of the largest step do not keep a smaller one from it.
  if (inverts_blocks(largest.in_types[kQ], q, largest.in[kKvCache], block_ids, 0)) {
    bytes = std::max(bytes, kernels::sparse_prefill_workspace(
                                static_cast<int32_t>(q.d[0]), heads, num_kv_heads,
                                static_cast<int32_t>(table.d[0]), static_cast<int32_t>(table.d[1]),
                                static_cast<int32_t>(block_ids.d[2])));
  }
  return bytes;
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
  p.num_rows = p.tokens.num_tokens;
  p.num_heads = static_cast<int32_t>(q.d[1]);
  p.num_kv_heads = static_cast<int32_t>(step.in[kKvCache].dims.d[3]);
  p.top_k = static_cast<int32_t>(step.in[kBlockIds].dims.d[2]);
  p.softmax_scale = attributes().softmax_scale;
  p.type = kernel_type(step.in[kQ].type);
  kernels::Type const cache_type = kernel_type(step.in[kKvCache].type);
  RowSplit const rows = split_rows(step.in[kDecodeRows].dims, p.tokens);
  bool const split =
      splits_decode(step.in[kQ].type, step.in[kKvCache].type, step.in[kBlockIds].dims) &&
      kernels::has_paged_decode();
  kernels::PagedDecodeParams decode = decode_params(
      p, rows, kernels::view_of_virtual_pages(p.kv_cache, p.num_kv_heads, cache_type));
  decode.block_ids = p.block_ids;
  decode.top_k = p.top_k;
  if (split) {
    p.num_rows = rows.context_tokens;
    check_launch(kernels::launch_paged_decode(decode, step.workspace, step.stream), "paged_decode");
  }
  if (p.num_rows == 0) return;
  kernels::SparseRoute const route = kernels::sparse_route(
      rows.context_tokens, p.num_heads, rows.context_requests, p.tokens.max_pages, p.top_k);
  kernels::ContextRows context = context_rows(p, rows, step.in[kKvCache].dims.d[0]);
  context.block_ids = p.block_ids;
  context.top_k = p.top_k;
  bool clusters = false;
  // TMA describes no empty cache.
  if (split && route == kernels::SparseRoute::kRows && step.in[kKvCache].dims.d[0] > 0) {
    check_launch(kernels::has_clusters(clusters), "has_clusters");
  }
  if (clusters) {
    decode.num_context = rows.context_tokens;
    check_launch(kernels::launch_selected_decode(decode, step.stream), "selected_decode");
  } else if ((split || rows.num_decode == 0) && route == kernels::SparseRoute::kDense &&
             sees_dense(step.in[kQ].type, step.in[kKvCache].type, p.top_k)) {
    kernels::PagedPrefillParams tiles{context};
    tiles.joined.end_position = kernels::kAllPositions;
    check_launch(launch_paged_prefill(tiles, step.stream), "paged_prefill");
  } else if ((split || rows.num_decode == 0) &&
             inverts_blocks(step.in[kQ].type, q, step.in[kKvCache].dims, step.in[kBlockIds].dims,
                            rows.context_requests)) {
    check_launch(launch_prefill({context, p.kv_scale}, step.workspace, step.stream),
                 "sparse_prefill");
  } else {
    check_launch(kernels::launch_sparse_attention(p, step.stream), "sparse_attention");
  }
}

}  // namespace m3

M3_DEFINE_CREATOR(sparse_attention, m3::SparseAttentionPlugin)
