#pragma once

#include "kernels/packed_tokens.h"

namespace m3::kernels {

// Where a packed token belongs. Padding has position -1, and so has a token whose request claims
// fewer tokens than it brings (nothing may be read for it).
struct TokenPlace {
  int32_t request;
  int32_t position;  // absolute, in the sequence

  __device__ bool is_padding() const { return position < 0; }
  __device__ int32_t own_block() const { return position / kBlockSize; }
};

__device__ inline TokenPlace locate_token(PackedTokens const& tokens, int32_t token) {
  int32_t const* __restrict__ const cu = tokens.cu_query_lens;
  int32_t const r_count = tokens.num_requests;
  if (r_count == 0 || token >= cu[r_count]) return {-1, -1};
  // The last request that starts at or before the token: requests without tokens are stepped over.
  int32_t low = 0, high = r_count - 1;
  while (low < high) {
    int32_t const middle = low + (high - low + 1) / 2;
    if (cu[middle] <= token) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  int32_t const position = tokens.sequence_length[low] - (cu[low + 1] - token);
  return {low, position < 0 ? -1 : position};
}

// Page of a logical block, -1 when the table has none.
__device__ inline int32_t page_of(PackedTokens const& tokens, int32_t request, int32_t block) {
  if (block < 0 || block >= tokens.max_pages) return -1;
  return tokens.block_offsets[static_cast<int64_t>(request) * tokens.max_pages + block];
}

}  // namespace m3::kernels
