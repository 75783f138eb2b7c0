#pragma once

#include <cuda_runtime_api.h>

#include "kernels/smxx_block_select.h"

// Block selection of the context rows at tensor-core speed: block_ids of all tokens in front of the
// decode rows. The result is launch_block_select's, up to the rounding of the scores.
namespace m3::kernels {

// bf16 queries with 1, 2, 4 or 8 index heads.
bool has_prefill_select(Type type, int32_t num_index_heads);

// Bytes of scores that are kept at once, at most 256 MB (more only from 262,144 pages a request
// on): what does not fit is scored and selected in rounds, whose number follows from shapes. Never
// less than for smaller arguments.
int64_t prefill_select_workspace_bytes(int64_t num_tokens, int64_t num_index_heads,
                                       int64_t max_pages);

cudaError_t launch_smxx_prefill_select(BlockSelectParams const& p, void* workspace,
                                       cudaStream_t stream);

// The same with wgmma and TMA, for compute capability 9.0 and a bf16 cache.
bool has_sm90_prefill_select(BlockSelectParams const& p);
cudaError_t launch_sm90_prefill_select(BlockSelectParams const& p, void* workspace,
                                       cudaStream_t stream);

}  // namespace m3::kernels
