#include <algorithm>

#include "kernels/paged_prefill_tiles.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/smxx_join_tiles.h"

namespace m3::kernels {
namespace {

constexpr int WARPS = 16;
constexpr int32_t MIN_TILES = 256;
constexpr int32_t MOST_BLOCKS = 1 << 14;  // 32 KB of bits a thread block
constexpr int32_t MANY_BLOCKS = 48;  // of a tile: by how much they are too many does not matter

// What a joined tile takes, for each page and once, and what a token's rows of 16 heads take block
// by block, for each block and for each partial result: hundredths of a microsecond of a
// multiprocessor.
constexpr int32_t PAGE_COST = 135, TILE_COST = 600, BLOCK_COST = 22, PARTIAL_COST = 21;

struct JoinLimits {
  int32_t most_blocks;  // of a tile,
  int32_t end_block;    // all in front of this one
  int32_t lists;        // InvertParams::lists, of the rows that are not joined
};

// Of the rows of a tile and a KV head.
struct Costs {
  int32_t together;  // blocks
  int32_t as_tile, by_blocks;
};

// By a warp. `bits`: one for each block up to `last`, the last token's own one.
__device__ Costs costs_of(PagedPrefillParams const& p, JoinLimits const& limits,
                          PrefillTile const& tile, int head, int32_t last, uint32_t* bits) {
  constexpr int EACH = 8;  // tokens looked at together
  int const lane = threadIdx.x % 32;
  for (int i = lane; i <= last / 32; i += 32) bits[i] = 0;
  __syncwarp();
  int together = 0, chosen = 0, partials = 0;
  auto const mark = [&](int32_t block) {
    if (block < 0) return;
    uint32_t const bit = 1u << block % 32;
    together += (atomicOr(bits + block / 32, bit) & bit) == 0;
  };
  int32_t chose[EACH];  // a place a lane
  auto const load = [&](int first) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      bool const exists = first + i < tile.num_tokens && lane < p.top_k;
      chose[i] = exists ? chosen_block(p, tile, head, first + i, lane) : -1;
    }
  };
  if (lane == 0) mark(last);  // is attended to in any case
  for (int first = 0; first < tile.num_tokens; first += EACH) {
    load(first);
#pragma unroll
    for (int32_t const block : chose) {
      mark(block);
      chosen += block >= 0;
    }
  }
  together = static_cast<int>(__reduce_add_sync(~0u, together));
  // A pair of blocks has one partial result: form_pairs says which are pairs.
  for (int first = 0; first < tile.num_tokens && together < MANY_BLOCKS; first += EACH) {
    if (tile.num_tokens > EACH) load(first);
#pragma unroll
    for (int32_t const block : chose) {
      uint32_t* const run = bits + max(block, 0) / 32;
      __syncwarp();
      if (block >= 0) *run = 0;
      __syncwarp();
      if (block >= 0) atomicOr(run, 1u << block % 32);
      __syncwarp();
      int const place = block % 32;
      uint32_t const before = block >= 0 && place > 0 ? *run << (32 - place) : 0;
      bool const ends_pair = limits.lists == 2 && __clz(static_cast<int>(~before)) % 2 != 0;
      partials += block >= 0 && !ends_pair;
    }
  }
  partials = static_cast<int>(__reduce_add_sync(~0u, partials));
  chosen = static_cast<int>(__reduce_add_sync(~0u, chosen));
  return {together, (PAGE_COST * together + TILE_COST) * p.joined.tokens,
          (BLOCK_COST * chosen + PARTIAL_COST * partials) * (kPrefillRows / kMaxGroup)};
}

// Grid: (slots / WARPS, KV heads), a tile a warp. Those of a thread block are joined, where they
// may be, if that would save time were all of them.
__global__ void __launch_bounds__(32 * WARPS)
    join_tiles_kernel(PagedPrefillParams const p, JoinLimits const limits, int32_t words) {
  extern __shared__ uint32_t all_bits[];
  __shared__ int32_t saved;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int const head = blockIdx.y;
  int32_t const slot = static_cast<int32_t>(blockIdx.x) * WARPS + warp;
  if (threadIdx.x == 0) saved = 0;
  PrefillTile tile{};
  if (slot < p.joined.slots) tile = prefill_tile(p, p.joined.tokens, slot);
  wait_for_previous_kernel();
  let_next_kernel_start();  // not before: the next one awaits only the flags
  __syncthreads();
  int32_t const blocks = (tile.length() + kBlockSize - 1) / kBlockSize;
  int32_t const last = min(blocks, p.tokens.max_pages) - 1;
  bool const is_in_front = last < p.top_k;  // no row has more blocks
  bool may_be = tile.num_tokens > 0;
  if (may_be && !is_in_front && last < limits.end_block) {
    Costs const costs = costs_of(p, limits, tile, head, last, all_bits + warp * words);
    may_be = costs.together <= limits.most_blocks;
    if (lane == 0) atomicAdd(&saved, costs.by_blocks - costs.as_tile);
  } else {
    may_be = may_be && is_in_front;
  }
  __syncthreads();
  if (lane == 0 && slot < p.joined.slots) {
    p.joined.flags[int64_t{slot} * p.num_kv_heads + head] = may_be && (is_in_front || saved >= 0);
  }
}

bool joins_by_position(int32_t num_tokens, int32_t num_heads) {
  return int64_t{num_tokens} * num_heads < MIN_TILES * kPrefillRows;
}

}  // namespace

int32_t joined_blocks(int32_t num_tokens, int32_t num_heads, int32_t top_k) {
  if (joins_by_position(num_tokens, num_heads)) return std::min(top_k, kMaxJoined);
  auto const tiles = static_cast<int32_t>(
      std::min<int64_t>(int64_t{num_tokens} * num_heads / kPrefillRows, 1 << 20));
  return std::min({top_k + tiles / 32, 2 * top_k, kMaxJoined});
}

JoinedTiles place_joined_tiles(Carver& carver, int32_t num_heads, int32_t num_kv_heads,
                               int32_t num_tokens, int32_t num_requests) {
  JoinedTiles joined{};
  joined.tokens = kPrefillRows / (num_heads / num_kv_heads);
  joined.slots = prefill_slots(num_tokens, num_requests, joined.tokens);
  // Read by 16 at once.
  carver.take(joined.flags, int64_t{num_kv_heads} * joined.slots + 15);
  return joined;
}

void limit_joined_tiles(JoinedTiles& joined, int32_t num_tokens, int32_t num_heads, int32_t top_k) {
  if (joins_by_position(num_tokens, num_heads)) joined.flags = nullptr;
  joined.end_position = joined_blocks(num_tokens, num_heads, top_k) * kBlockSize;
}

cudaError_t launch_join_tiles(PagedPrefillParams const& p, int32_t end_block, int32_t lists,
                              cudaStream_t stream) {
  if (p.joined.flags == nullptr || p.num_requests == 0) return cudaSuccess;
  JoinLimits const limits{joined_blocks(p.num_tokens, p.num_heads, p.top_k),
                          std::min(end_block, MOST_BLOCKS), lists};
  int32_t const words = (std::min(limits.end_block, p.tokens.max_pages) + 31) / 32;
  dim3 const grid((p.joined.slots + WARPS - 1) / WARPS, p.num_kv_heads);
  return launch_behind(join_tiles_kernel, grid, 32 * WARPS, WARPS * words * sizeof(uint32_t),
                       stream, p, limits, words);
}

}  // namespace m3::kernels
