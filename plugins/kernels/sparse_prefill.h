#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/paged_prefill.h"

// Context rows of SparseAttention, block by block: every selected KV block is loaded once and meets
// all queries that chose it. A query's blocks give partial results, which a last pass merges.
namespace m3::kernels {

struct SparsePrefillParams : ContextRows {  // Hq = Hkv times 8 or 16
  float const* kv_scale;  // [1] when the cache is e4m3: real = stored * scale; else null
};

// The rows are computed in rounds of so many tokens and KV heads, whose partial results exist
// together.
struct SparsePrefillRounds {
  int32_t tokens;
  int32_t heads;
};

// Whether the kernels take these shapes; `num_requests` as above.
bool takes_sparse_prefill(int32_t num_heads, int32_t num_kv_heads, int32_t num_requests,
                          int32_t top_k);

// How the context rows of a step are computed best, by what the host knows: shapes.
enum class SparseRoute {
  kRows,    // each for itself, by launch_selected_decode: few tokens, which hardly share blocks
  kDense,   // all blocks that a tile's rows chose: page tables of joined_blocks columns at most
  kBlocks,  // block by block
};
SparseRoute sparse_route(int32_t num_tokens, int32_t num_heads, int32_t num_requests,
                         int32_t max_pages, int32_t top_k);

// Rounds that keep the partial results within about 1.1 GB.
SparsePrefillRounds sparse_prefill_rounds(int32_t num_tokens, int32_t num_heads,
                                          int32_t num_kv_heads, int32_t top_k);

// Bytes for up to so many tokens, requests and pages of a request, in rounds that are no larger.
size_t sparse_prefill_workspace(int32_t num_tokens, int32_t num_heads, int32_t num_kv_heads,
                                int32_t num_requests, int32_t max_pages, int32_t top_k);

// With mma.sync and cp.async.
cudaError_t launch_smxx_sparse_prefill(SparsePrefillParams const& p, SparsePrefillRounds rounds,
                                       void* workspace, cudaStream_t stream);

// With wgmma and TMA, for compute capability 9.0 and a bf16 cache.
bool has_sm90_sparse_prefill();
cudaError_t launch_sm90_sparse_prefill(SparsePrefillParams const& p, SparsePrefillRounds rounds,
                                       void* workspace, cudaStream_t stream);

}  // namespace m3::kernels
