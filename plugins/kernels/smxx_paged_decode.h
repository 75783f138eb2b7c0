#pragma once

#include <cuda_runtime_api.h>

#include "kernels/packed_tokens.h"
#include "kernels/types.h"

namespace m3::kernels {

// Strided view of a bf16 or e4m3 pool, in elements: key t of page `id` and KV head h starts at
// keys + id * page_stride + h * head_stride + t * token_stride.
struct DecodeView {
  void const* keys;
  void const* values;
  int64_t page_stride;
  int64_t head_stride;
  int64_t token_stride;
  int32_t ids_per_page;  // id = page * ids_per_page + h * ids_per_head
  int32_t ids_per_head;
  Type type;  // of the elements
};

// A [P, 2, B, Hkv, D] pool as pages of all heads, id = page.
DecodeView view_of_pages(void const* kv_cache, int32_t num_kv_heads, Type type);
// The same pool as single-head virtual pages: page stride D, id = page * 2 * B * Hkv + h.
DecodeView view_of_virtual_pages(void const* kv_cache, int32_t num_kv_heads, Type type);

struct PagedDecodeParams {  // shapes: N tokens, D = 128
  PackedTokens tokens;
  DecodeView view;
  float const* kv_scale;     // [1] when the pool is e4m3: real = stored * scale; else null
  void const* q;             // bf16 [N, Hq, D]
  int32_t const* block_ids;  // [Hkv, N, top_k] logical blocks, -1 anywhere is skipped; null: all
  void* out;                 // bf16 [N, Hq * D]; zero for padding
  int32_t num_heads;         // Hq = Hkv times 1 .. 16
  int32_t num_kv_heads;      // Hkv
  int32_t top_k;             // up to 32; 0 without block_ids
  int32_t num_decode;        // the last num_decode requests, whose tokens are the last
  int32_t q_len;             // num_decode * q_len of the step
  float softmax_scale;
  int32_t num_context;  // launch_selected_decode: the first tokens instead, unless 0
};

constexpr int kMaxSelectedBlocks = 32;

// Bytes of workspace for steps of up to q_len query tokens a request; does not depend on the batch
// or the context.
size_t paged_decode_workspace(int32_t num_heads, int32_t num_kv_heads, int32_t q_len,
                              bool has_block_ids);

// Whether this GPU has the shared memory that the kernels take: 227 KB as from sm_90 on in data
// centres, not 163 KB or 99 KB.
bool has_paged_decode();

// Causal attention of the decode rows, on a GPU that has_paged_decode. Nothing depends on
// sequence_length at the launch. A context is split over the whole GPU on the device. A selection
// is split, from sm_90 on, over a cluster whose size follows from the number of decode rows and KV
// heads.
cudaError_t launch_paged_decode(PagedDecodeParams const& p, void* workspace, cudaStream_t stream);

}  // namespace m3::kernels
