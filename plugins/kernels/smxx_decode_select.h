#pragma once

#include "kernels/smxx_block_select.h"

namespace m3::kernels {

// Bytes of scores that are kept at once. Never less than for smaller arguments, and bounded: what
// does not fit is scored and selected in several rounds of requests.
int64_t decode_select_workspace_bytes(int64_t num_decode_requests, int64_t decode_length,
                                      int64_t num_index_heads, int64_t max_pages);

// launch_block_select's result for the decode rows, the last num_decode_requests * decode_length
// tokens, with tensor cores; bf16 queries, a bf16 or e4m3 cache. A row's result follows from its
// own keys alone, bit by bit, whatever else is in the step.
//
// Reads cu_query_lens, sequence_length, block_offsets and the keys of pages that were full before
// this step while the kernel in front of it may still run: no kernel of the step may write them.
// Marks rows until they are chosen (arriving_ids.cuh).
cudaError_t launch_decode_select(BlockSelectParams const& p, void* workspace, cudaStream_t stream);

}  // namespace m3::kernels
