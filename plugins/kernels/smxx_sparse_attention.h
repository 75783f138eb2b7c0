#pragma once

#include <cuda_runtime_api.h>

#include "kernels/packed_tokens.h"
#include "kernels/types.h"

namespace m3::kernels {

struct SparseAttentionParams {  // shapes: N tokens, P pages, B = 128, D = 128
  PackedTokens tokens;
  void const* q;             // [N, Hq, D]
  void const* kv_cache;      // [P, 2, B, Hkv, D]
  float const* kv_scale;     // [1] when the cache is e4m3: real = stored * scale; else null
  int32_t const* block_ids;  // [Hkv, N, top_k] logical blocks, none twice; -1 anywhere is skipped
  void* out;                 // [N, Hq * D]; zero for padding and rows without blocks
  int32_t num_rows;          // the first tokens, which this launch computes
  int32_t num_heads;         // Hq = Hkv times 1 .. 16
  int32_t num_kv_heads;      // Hkv
  int32_t top_k;
  float softmax_scale;
  Type type;  // of q and out, and of the cache when there is no scale
};

// Exact attention of the rows over the keys at or before it in its selected blocks.
cudaError_t launch_sparse_attention(SparseAttentionParams const& p, cudaStream_t stream);

}  // namespace m3::kernels
