#pragma once

#include "kernels/packed_tokens.cuh"
#include "kernels/smxx_invert_blocks.h"

// What the kernels of the inversion share.
namespace m3::kernels {

// The first of a request's tokens in the round, counted from the round's first.
__device__ inline int32_t first_of(InvertParams const& p, int32_t request) {
  int32_t const token = p.tokens.cu_query_lens[request] - p.first_token;
  return min(max(token, 0), p.num_tokens);
}
__device__ inline int32_t num_blocks(InvertParams const& p, int32_t request) {
  if (first_of(p, request) >= first_of(p, request + 1)) return 0;
  int32_t const length = max(0, p.tokens.sequence_length[request]);
  return min(p.tokens.max_pages, (length + kBlockSize - 1) / kBlockSize);
}
// Position of a token of the request, minus the token's index.
__device__ inline int32_t position_shift(InvertParams const& p, int32_t request) {
  return p.tokens.sequence_length[request] - p.tokens.cu_query_lens[request + 1];
}

// How many of `count` tokens from a position on may have chosen all their blocks.
__device__ inline int32_t whole_tokens(InvertParams const& p, int32_t position, int32_t count) {
  return p.window == 0 ? 0 : min(count, max(0, p.top_k * kBlockSize - position));
}
// The listed tile of a window's tokens.
__device__ inline void list_window(InvertParams const& p, InvertedBlocks const& b, int32_t windows,
                                   int32_t window, int head, ListedTile const& tile) {
  b.listed[int64_t{windows - 1 - window} * p.num_kv_heads + head] = tile;
}

__device__ inline int32_t tiles_of(InvertParams const& p, int32_t queries) {
  return (queries + p.tile_queries - 1) / p.tile_queries;
}

// The warp's 32 neighbouring pairs from `first` on: those in `missing` have no block, those of them
// in `whole` begin a listed row.
__device__ inline void clear_lse(InvertParams const& p, int64_t first, uint32_t missing,
                                 uint32_t whole) {
  int const lane = threadIdx.x % 32, quads = p.group / 4;
  auto* const lse = reinterpret_cast<float4*>(p.lse + first * p.group);
  for (int i = lane; missing != 0 && i < 32 * quads; i += 32) {
    int const pair = i / quads;
    float const x = (whole >> pair & 1) != 0 ? INFINITY : -INFINITY;
    if ((missing >> pair & 1) != 0) lse[i] = make_float4(x, x, x, x);
  }
}

// Exclusive sum over a thread block of kWarps; `sums` holds a value a warp. `total`: of all.
template <int kWarps, class T>
__device__ T block_scan(T x, T* sums, T& total) {
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  T inclusive = x;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    T const other = __shfl_up_sync(~0u, inclusive, offset);
    if (lane >= offset) inclusive += other;
  }
  __syncthreads();  // the sums of an earlier scan have been read
  if (lane == 31) sums[warp] = inclusive;
  __syncthreads();
  T before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += sums[w];
    total += sums[w];
  }
  return before + inclusive - x;
}

}  // namespace m3::kernels
