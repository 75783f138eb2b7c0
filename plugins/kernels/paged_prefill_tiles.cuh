#pragma once

#include "kernels/packed_tokens.cuh"
#include "kernels/paged_prefill.h"

// Tiles of 128 query rows for the prefill kernels: row = token of the tile * group + query head of
// the KV head. Tiles never span two requests.
namespace m3::kernels {

struct PrefillTile {
  int32_t request;
  int32_t first_token;
  int32_t num_tokens;      // 0: no tile
  int32_t first_position;  // of the first token; negative when the request claims too few tokens
  // Keys that the last token sees.
  __device__ int32_t length() const { return max(0, first_position + num_tokens); }
};

// Request r owns the slots from cu[r] / tokens + r to those of request r + 1: at least as many as
// it needs, and the host knows how many there are at most.
__host__ __device__ inline int32_t prefill_slots(int32_t num_tokens, int32_t num_requests,
                                                 int tile_tokens) {
  int32_t const slots = num_tokens / tile_tokens + num_requests;
  return slots > 0 ? slots : 1;  // all padding
}
__host__ __device__ inline int32_t prefill_slots(PagedPrefillParams const& p, int tile_tokens) {
  return prefill_slots(p.num_tokens, p.num_requests, tile_tokens);
}

// The slots' tiles, those with most keys of each request first.
__device__ inline PrefillTile prefill_tile(PagedPrefillParams const& p, int tile_tokens,
                                           int32_t slot) {
  if (p.num_requests == 0) return {0, 0, 0, 0};
  int32_t const* __restrict__ const cu = p.tokens.cu_query_lens;
  slot = prefill_slots(p, tile_tokens) - 1 - slot;
  int32_t low = 0, high = p.num_requests - 1;
  while (low < high) {
    int32_t const middle = low + (high - low + 1) / 2;
    if (cu[middle] / tile_tokens + middle <= slot) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  int32_t const first = (slot - cu[low] / tile_tokens - low) * tile_tokens;
  int32_t const count = cu[low + 1] - cu[low];
  if (first < 0 || first >= count) return {low, 0, 0, 0};
  return {low, cu[low] + first, min(tile_tokens, count - first),
          p.tokens.sequence_length[low] - count + first};
}

__device__ inline bool is_in_front(JoinedTiles const& joined, PrefillTile const& tile) {
  return tile.first_position + tile.num_tokens <= joined.end_position;
}
__device__ inline bool is_joined(JoinedTiles const& joined, PrefillTile const& tile, int32_t slot,
                                 int head, int num_heads) {
  if (joined.flags == nullptr) return is_in_front(joined, tile);
  return joined.flags[int64_t{slot} * num_heads + head] != 0;
}

// Whether a token's tile is.
__device__ inline bool is_joined(JoinedTiles const& joined, PackedTokens const& tokens,
                                 int num_heads, int head, int32_t request, int32_t token) {
  int32_t const first = tokens.cu_query_lens[request], end = tokens.cu_query_lens[request + 1];
  int32_t const index = (token - first) / joined.tokens;
  int32_t const start = first + index * joined.tokens;
  PrefillTile const tile{request, start, min(joined.tokens, end - start),
                         tokens.sequence_length[request] - end + start};
  int32_t const slot = first / joined.tokens + request + index;
  return is_joined(joined, tile, joined.slots - 1 - slot, head, num_heads);
}

// The block that a token chose in a place of its list; -1: none that it sees.
__device__ inline int32_t chosen_block(PagedPrefillParams const& p, PrefillTile const& tile,
                                       int head, int token, int place) {
  int64_t const row = int64_t{head} * p.tokens.num_tokens + tile.first_token + token;
  int32_t const block = p.block_ids[row * p.top_k + place];
  int32_t const position = tile.first_position + token;
  bool const is_seen = block * kBlockSize <= position && block < p.tokens.max_pages;
  return is_seen ? max(block, -1) : -1;
}

// Tokens behind the real ones, among those of the context rows; by `threads` threads of each block
// of the grid.
__device__ inline void clear_context_padding(PagedPrefillParams const& p, int thread, int threads) {
  int64_t const per_token = int64_t{p.num_heads} * kHeadSize / 8;
  int64_t const block = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  int64_t const end = p.num_tokens * per_token;
  for (int64_t i =
           p.tokens.cu_query_lens[p.tokens.num_requests] * per_token + block * threads + thread;
       i < end; i += int64_t{gridDim.x} * gridDim.y * threads) {
    static_cast<uint4*>(p.out)[i] = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace m3::kernels
