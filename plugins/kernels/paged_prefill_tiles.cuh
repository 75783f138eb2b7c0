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

// A tile of which only some tokens may be wanted.
struct WantedTile : PrefillTile {
  uint32_t wanted;  // bit i: token i is to be written

  __device__ bool wants(int token) const {
    return token < num_tokens && (wanted >> token % 32 & 1) != 0;
  }
};

// Request r owns the slots from cu[r] / tokens + r to those of request r + 1: at least as many as
// it needs, and the host knows how many there are at most.
__host__ __device__ inline int32_t prefill_slots(PagedPrefillParams const& p, int tile_tokens) {
  int32_t const slots = p.num_tokens / tile_tokens + p.num_requests;
  return slots > 0 ? slots : 1;  // all padding
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

__device__ inline WantedTile listed_tile(PagedPrefillParams const& p, int32_t slot, int head) {
  ListedTile const tile = p.only.tiles[int64_t{slot} * p.num_kv_heads + head];
  return {{tile.request, tile.first_token, 32 - __clz(tile.tokens), tile.first_position},
          tile.tokens};
}

// How many slots have a tile at most, and theirs, whether they are listed or not.
__device__ inline int32_t filled_slots(PagedPrefillParams const& p, int tile_tokens) {
  return p.only.tiles != nullptr ? *p.only.count : prefill_slots(p, tile_tokens);
}
__device__ inline WantedTile any_tile(PagedPrefillParams const& p, int tile_tokens, int32_t slot,
                                      int head) {
  if (p.only.tiles != nullptr) return listed_tile(p, slot, head);
  return {prefill_tile(p, tile_tokens, slot), ~0u};
}

// Tokens behind the real ones, among those of the context rows; by all threads of the grid.
__device__ inline void clear_context_padding(PagedPrefillParams const& p) {
  int64_t const per_token = int64_t{p.num_heads} * kHeadSize / 8;
  int64_t const block = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  int64_t const end = p.num_tokens * per_token;
  for (int64_t i = p.tokens.cu_query_lens[p.tokens.num_requests] * per_token + block * blockDim.x +
                   threadIdx.x;
       i < end; i += int64_t{gridDim.x} * gridDim.y * blockDim.x) {
    static_cast<uint4*>(p.out)[i] = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace m3::kernels
