#include <algorithm>

#include "kernels/paged_prefill_tiles.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/smxx_join_tiles.h"

namespace m3::kernels {
namespace {

constexpr int WARPS = 4;
constexpr int32_t MIN_TILES = 256;
constexpr int32_t MOST_BLOCKS = 1 << 16;  // 32 KB of bits a thread block

// Grid: (slots / WARPS, KV heads). A warp marks the blocks of a tile as bits in shared memory.
__global__ void __launch_bounds__(32 * WARPS)
    join_tiles_kernel(PagedPrefillParams const p, int32_t most, int32_t end_block, int32_t words) {
  extern __shared__ uint32_t all_bits[];
  let_next_kernel_start();
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int const head = blockIdx.y;
  int32_t const slot = static_cast<int32_t>(blockIdx.x) * WARPS + warp;
  uint32_t* const bits = all_bits + warp * words;
  for (int i = lane; i < words; i += 32) bits[i] = 0;
  PrefillTile tile{};
  if (slot < p.joined.slots) tile = prefill_tile(p, p.joined.tokens, slot);
  wait_for_previous_kernel();
  if (slot >= p.joined.slots) return;
  int32_t const blocks = (tile.length() + kBlockSize - 1) / kBlockSize;
  int32_t const last = min(blocks, p.tokens.max_pages) - 1;
  __syncwarp();
  int count = 0;
  bool beyond = last >= end_block;
  auto const mark = [&](int32_t block) {
    if (block >= end_block) {
      beyond = true;
    } else if (block >= 0) {
      uint32_t const bit = 1u << block % 32;
      count += (atomicOr(bits + block / 32, bit) & bit) == 0;
    }
  };
  if (lane == 0) mark(last);
  for (int i = lane; i < tile.num_tokens * p.top_k; i += 32) {
    mark(chosen_block(p, tile, head, i / p.top_k, i % p.top_k));
  }
  bool const is_joined =
      tile.num_tokens > 0 && !__any_sync(~0u, beyond) &&
      static_cast<int>(__reduce_add_sync(~0u, count)) * p.joined.tokens <= most * tile.num_tokens;
  if (lane == 0) {
    p.joined.flags[int64_t{slot} * p.num_kv_heads + head] = is_joined;
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

cudaError_t launch_join_tiles(PagedPrefillParams const& p, int32_t end_block, cudaStream_t stream) {
  if (p.joined.flags == nullptr || p.num_requests == 0) return cudaSuccess;
  int32_t const end = std::min({end_block, p.tokens.max_pages, MOST_BLOCKS});
  int32_t const words = (end + 31) / 32;
  dim3 const grid((p.joined.slots + WARPS - 1) / WARPS, p.num_kv_heads);
  return launch_behind(join_tiles_kernel, grid, 32 * WARPS, WARPS * words * sizeof(uint32_t),
                       stream, p, joined_blocks(p.num_tokens, p.num_heads, p.top_k), end, words);
}

}  // namespace m3::kernels
