#pragma once

#include <cuda_runtime_api.h>

#include "kernels/packed_tokens.h"
#include "kernels/types.h"

namespace m3::kernels {

constexpr int kMaxTopK = 32;
constexpr int kMaxIndexHeads = 8;

struct BlockSelectParams {  // shapes: N tokens, P pages, D = 128
  PackedTokens tokens;
  void const* index_q;          // [N, Hi, D]
  void const* index_cache;      // [P, 128, D]
  float const* index_scale;     // [1] when the cache is e4m3: real = stored * scale; else null
  int32_t* block_ids;           // out [Hi, N, top_k], ascending, own block last valid, then -1
  int32_t num_index_heads;      // Hi
  int32_t num_decode_requests;  // the last num_decode_requests * decode_length tokens are decode
  int32_t decode_length;
  int32_t top_k;
  int32_t init_blocks;   // blocks 0 .. init_blocks-1 are always taken
  int32_t local_blocks;  // so are the local_blocks blocks that end at the query's own, >= 1
  int32_t num_pages;     // P; only prefill_select.h's kernels use it
  Type type;             // of index_q, and of the cache when there is no scale
};

// Bytes of scores that are kept at once. Never less than for smaller arguments, and bounded: what
// does not fit is scored and selected in several rounds.
int64_t block_select_workspace_bytes(int64_t num_tokens, int64_t num_index_heads,
                                     int64_t max_pages);

// Score of a block = largest dot product of the query with the block's keys at or before it, fp32.
// A NaN product loses to every number. Equal scores: the lower block wins.
cudaError_t launch_block_select(BlockSelectParams const& p, void* workspace, cudaStream_t stream);

// The context rows or the decode rows alone, where another kernel serves the others.
cudaError_t launch_block_select_context(BlockSelectParams const& p, void* workspace,
                                        cudaStream_t stream);
cudaError_t launch_block_select_decode(BlockSelectParams const& p, void* workspace,
                                       cudaStream_t stream);

}  // namespace m3::kernels
