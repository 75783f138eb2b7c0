#include <algorithm>

#include "kernels/numeric.cuh"
#include "kernels/packed_tokens.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/smxx_invert_blocks.h"

// Three kernels, each over all KV heads. (1) Tiles of up to 128 tokens of one request mark in
// shared memory which of them chose a block: a mask of 128 bits for each block, which gives a
// pair's rank and the tile's counts whatever the order of the marks. (2) Counts are summed over
// the tiles, groups of 32 blocks at a time; the last thread block sums over the groups. (3) Every
// query goes to its place; every block that has some becomes an item.
namespace m3::kernels {
namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int TILE_TOKENS = 128;
constexpr int GROUP = 32;            // blocks
constexpr int MASKED_BLOCKS = 4096;  // that a tile marks at once: 64 KB
constexpr int MAX_TOKENS = 1 << 16;  // counts are 16 bits wide
constexpr size_t ALIGNMENT = 256;

__host__ __device__ int32_t num_slots(int32_t num_tokens, int32_t num_requests) {
  return num_tokens / TILE_TOKENS + num_requests;
}
__host__ __device__ int32_t pitch(int32_t max_pages) {
  return (max_pages + GROUP - 1) / GROUP * GROUP;
}

// The first of a request's tokens in the round, counted from the round's first.
__device__ int32_t first_of(InvertParams const& p, int32_t request) {
  int32_t const token = p.tokens.cu_query_lens[request] - p.first_token;
  return min(max(token, 0), p.num_tokens);
}
__device__ int32_t num_blocks(InvertParams const& p, int32_t request) {
  if (first_of(p, request) >= first_of(p, request + 1)) return 0;
  int32_t const length = max(0, p.tokens.sequence_length[request]);
  return min(p.tokens.max_pages, (length + kBlockSize - 1) / kBlockSize);
}
// Position of a token of the request, minus the token's index.
__device__ int32_t position_shift(InvertParams const& p, int32_t request) {
  return p.tokens.sequence_length[request] - p.tokens.cu_query_lens[request + 1];
}

struct TokenTile {
  int32_t request, first, count;  // tokens of the round; count 0: no tile
};

// Request r owns the slots from first_of(r) / 128 + r to those of request r + 1.
__device__ TokenTile token_tile(InvertParams const& p, int32_t slot) {
  int32_t low = 0, high = p.num_requests - 1;
  while (low < high) {
    int32_t const middle = low + (high - low + 1) / 2;
    if (first_of(p, middle) / TILE_TOKENS + middle <= slot) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  int32_t const begin = first_of(p, low), count = first_of(p, low + 1) - begin;
  int32_t const first = (slot - begin / TILE_TOKENS - low) * TILE_TOKENS;
  if (first < 0 || first >= count) return {low, 0, 0};
  return {low, begin + first, min(TILE_TOKENS, count - first)};
}

// Exclusive sum over the thread block; `sums` holds a value a warp. `total` is the sum of all.
__device__ int32_t block_scan(int32_t x, int32_t* sums, int32_t& total) {
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int32_t inclusive = x;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    int32_t const other = __shfl_up_sync(~0u, inclusive, offset);
    if (lane >= offset) inclusive += other;
  }
  __syncthreads();  // the sums of an earlier scan have been read
  if (lane == 31) sums[warp] = inclusive;
  __syncthreads();
  int32_t before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    if (w < warp) before += sums[w];
    total += sums[w];
  }
  return before + inclusive - x;
}

__device__ void place_groups(InvertParams const& p, InvertedBlocks const& b) {
  __shared__ int32_t sums[WARPS];
  int32_t before = 0;
  for (int32_t first = 0; first <= p.num_requests; first += THREADS) {
    int32_t const r = first + threadIdx.x;
    int32_t const groups = r < p.num_requests ? (num_blocks(p, r) + GROUP - 1) / GROUP : 0;
    int32_t total;
    int32_t const at = block_scan(groups, sums, total);
    if (r <= p.num_requests) b.first_group[r] = before + at;
    before += total;
  }
  if (threadIdx.x == 0) *b.arrived = 0;
}

// Grid: (slots, KV heads).
__global__ void __launch_bounds__(THREADS)
    mark_kernel(InvertParams const p, InvertedBlocks const b) {
  extern __shared__ uint4 masks[];  // bit i of a block: the tile's token i chose it
  wait_for_previous_kernel();
  if (blockIdx.x == 0 && blockIdx.y == 0) place_groups(p, b);
  TokenTile const tile = token_tile(p, blockIdx.x);
  if (tile.count == 0) return;
  int const head = blockIdx.y;
  int32_t const blocks = num_blocks(p, tile.request);
  int32_t const first_position = p.first_token + tile.first + position_shift(p, tile.request);
  int64_t const first_token = int64_t{head} * p.tokens.num_tokens + p.first_token + tile.first;
  int32_t const* const ids = p.block_ids + first_token * p.top_k;
  uint8_t* const ranks = b.ranks + (int64_t{head} * p.num_tokens + tile.first) * p.top_k;
  uint16_t* const counts =
      b.counts + (int64_t{head} * gridDim.x + blockIdx.x) * pitch(p.tokens.max_pages);
  int const pairs = tile.count * p.top_k;

  for (int32_t base = 0; base < blocks; base += MASKED_BLOCKS) {
    int32_t const here = min(MASKED_BLOCKS, blocks - base);
    for (int i = threadIdx.x; i < here; i += THREADS) masks[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    auto const in_reach = [&](int32_t id, int token) {
      return id >= base && id < base + here && id * kBlockSize <= first_position + token;
    };
    for (int i = threadIdx.x; i < pairs; i += THREADS) {
      int32_t const id = ids[i];
      int const token = i / p.top_k;
      if (!in_reach(id, token)) continue;
      atomicOr(reinterpret_cast<uint32_t*>(masks + id - base) + token / 32, 1u << token % 32);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < pairs; i += THREADS) {
      int32_t const id = ids[i];
      int const token = i / p.top_k;
      if (!in_reach(id, token)) continue;
      uint4 const mask = masks[id - base];
      uint32_t const words[4] = {mask.x, mask.y, mask.z, mask.w};
      int rank = 0;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint32_t const before = w < token / 32 ? ~0u : w > token / 32 ? 0u : (1u << token % 32) - 1;
        rank += __popc(words[w] & before);
      }
      ranks[i] = static_cast<uint8_t>(rank);
    }
    for (int i = threadIdx.x; i < here; i += THREADS) {
      uint4 const mask = masks[i];
      counts[base + i] =
          static_cast<uint16_t>(__popc(mask.x) + __popc(mask.y) + __popc(mask.z) + __popc(mask.w));
    }
    __syncthreads();
  }
}

__device__ int32_t tiles_of(InvertParams const& p, int32_t queries) {
  return (queries + p.tile_queries - 1) / p.tile_queries;
}

struct BlockGroup {
  int32_t head, request, first_block;
};
__device__ BlockGroup block_group(InvertParams const& p, InvertedBlocks const& b, int32_t groups,
                                  int32_t index) {
  int32_t const within = index % groups;
  int32_t low = 0, high = p.num_requests - 1;
  while (low < high) {
    int32_t const middle = low + (high - low + 1) / 2;
    if (b.first_group[middle] <= within) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return {index / groups, low, (within - b.first_group[low]) * GROUP};
}

// Sums of the groups become what lies before them; by one thread block.
__device__ void sum_groups(InvertedBlocks const& b, int32_t count) {
  __shared__ int32_t sums[WARPS];
  GroupStart before{};
  for (int32_t first = 0; first <= count; first += THREADS) {
    int32_t const i = first + threadIdx.x;
    GroupStart const mine = i < count ? b.starts[i] : GroupStart{};
    GroupStart total, at;
    at.queries = before.queries + block_scan(mine.queries, sums, total.queries);
    at.tiles = before.tiles + block_scan(mine.tiles, sums, total.tiles);
    at.items = before.items + block_scan(mine.items, sums, total.items);
    at.unused = 0;
    if (i <= count) b.starts[i] = at;
    before.queries += total.queries;
    before.tiles += total.tiles;
    before.items += total.items;
  }
}

// Grid: thread blocks that share the groups. A warp has a share of the tiles of a group's request,
// a lane a block.
__global__ void __launch_bounds__(THREADS)
    count_kernel(InvertParams const p, InvertedBlocks const b, int32_t slots) {
  __shared__ int32_t segment[WARPS][GROUP];
  __shared__ bool last;
  wait_for_previous_kernel();
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int32_t const groups = b.first_group[p.num_requests];
  int32_t const width = pitch(p.tokens.max_pages);
  for (int32_t g = blockIdx.x; g < p.num_kv_heads * groups; g += gridDim.x) {
    BlockGroup const group = block_group(p, b, groups, g);
    int32_t const block = group.first_block + lane;
    int32_t const page =
        block < num_blocks(p, group.request) ? page_of(p.tokens, group.request, block) : -1;
    int32_t const begin = first_of(p, group.request);
    int32_t const tokens = first_of(p, group.request + 1) - begin;
    int32_t const tiles = (tokens + TILE_TOKENS - 1) / TILE_TOKENS;
    int32_t const share = (tiles + WARPS - 1) / WARPS;
    int32_t const from = warp * share, to = min(tiles, from + share);
    int64_t const slot = int64_t{group.head} * slots + begin / TILE_TOKENS + group.request;
    uint16_t* const counts = b.counts + slot * width + block;
    int32_t sum = 0;
    if (page >= 0) {
#pragma unroll 8
      for (int32_t t = from; t < to; ++t) sum += counts[int64_t{t} * width];
    }
    segment[warp][lane] = sum;
    __syncthreads();
    int32_t before = 0, total = 0;
    for (int w = 0; w < WARPS; ++w) {
      if (w < warp) before += segment[w][lane];
      total += segment[w][lane];
    }
    if (page >= 0) {
#pragma unroll 8
      for (int32_t t = from; t < to; ++t) {
        int32_t const count = counts[int64_t{t} * width];
        counts[int64_t{t} * width] = static_cast<uint16_t>(before);
        before += count;
      }
    }
    if (warp == 0) {
      int32_t inclusive = total;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        int32_t const other = __shfl_up_sync(~0u, inclusive, offset);
        if (lane >= offset) inclusive += other;
      }
      b.blocks[int64_t{g} * GROUP + lane] = make_int2(total, page < 0 ? -1 : inclusive - total);
      int32_t const attention_tiles = __reduce_add_sync(~0u, tiles_of(p, total));
      int32_t const items = __popc(__ballot_sync(~0u, total > 0));
      if (lane == 31) b.starts[g] = {inclusive, attention_tiles, items, 0};
    }
    __syncthreads();
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(b.arrived, 1) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  sum_groups(b, p.num_kv_heads * groups);
}

__device__ void place_queries(InvertParams const& p, InvertedBlocks const& b, int32_t slots,
                              int32_t slot, int head) {
  TokenTile const tile = token_tile(p, slot);
  if (tile.count == 0) return;
  int32_t const groups = b.first_group[p.num_requests];
  int32_t const blocks = num_blocks(p, tile.request);
  int32_t const first_group = head * groups + b.first_group[tile.request];
  int32_t const first_position = p.first_token + tile.first + position_shift(p, tile.request);
  int64_t const first_token = int64_t{head} * p.tokens.num_tokens + p.first_token + tile.first;
  int32_t const* const ids = p.block_ids + first_token * p.top_k;
  int64_t const first_pair = (int64_t{head} * p.num_tokens + tile.first) * p.top_k;
  uint16_t const* const counts =
      b.counts + (int64_t{head} * slots + slot) * pitch(p.tokens.max_pages);
  int const pairs = tile.count * p.top_k;
#pragma unroll 4
  for (int i = threadIdx.x; i < pairs; i += THREADS) {
    int32_t const id = ids[i];
    int32_t before = -1;
    if (id >= 0 && id < blocks && id * kBlockSize <= first_position + i / p.top_k) {
      before = b.blocks[int64_t{first_group} * GROUP + id].y;
    }
    if (before >= 0) {
      int32_t const at = b.starts[first_group + id / GROUP].queries + before + counts[id] +
                         b.ranks[first_pair + i];
      b.queries[at] = tile.first * p.top_k + i;
    } else {
      for (int h = 0; h < p.group; ++h) p.lse[(first_pair + i) * p.group + h] = -INFINITY;
    }
  }
}

__device__ void place_items(InvertParams const& p, InvertedBlocks const& b, int32_t g) {
  int const lane = threadIdx.x % 32;
  int32_t const groups = b.first_group[p.num_requests];
  BlockGroup const group = block_group(p, b, groups, g);
  int2 const queries = b.blocks[int64_t{g} * GROUP + lane];
  GroupStart const start = b.starts[g];
  int32_t const tiles = tiles_of(p, queries.x);
  int32_t before = tiles;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    int32_t const other = __shfl_up_sync(~0u, before, offset);
    if (lane >= offset) before += other;
  }
  uint32_t const used = __ballot_sync(~0u, queries.x > 0);
  if (queries.x == 0) return;
  int32_t const block = group.first_block + lane;
  KvItem item;
  item.page = page_of(p.tokens, group.request, block);
  item.head = group.head;
  item.first_query = start.queries + queries.y;
  item.num_queries = queries.x;
  item.first_tile = start.tiles + before - tiles;
  item.visible = min(kBlockSize, p.tokens.sequence_length[group.request] - block * kBlockSize);
  item.limit = position_shift(p, group.request) + 1 - block * kBlockSize;
  item.unused = 0;
  b.items[start.items + __popc(used & ((1u << lane) - 1))] = item;
}

// Grid: slots of every KV head, then thread blocks that share the groups.
__global__ void __launch_bounds__(THREADS)
    fill_kernel(InvertParams const p, InvertedBlocks const b, int32_t slots) {
  wait_for_previous_kernel();
  int32_t const tiles = slots * p.num_kv_heads;
  if (static_cast<int32_t>(blockIdx.x) < tiles) {
    place_queries(p, b, slots, blockIdx.x % slots, blockIdx.x / slots);
    return;
  }
  int32_t const count = p.num_kv_heads * b.first_group[p.num_requests];
  for (int32_t g = (blockIdx.x - tiles) * WARPS + threadIdx.x / 32; g < count;
       g += (gridDim.x - tiles) * WARPS) {
    place_items(p, b, g);
  }
}

template <class T>
T* carve(char*& memory, int64_t count) {
  auto const address = reinterpret_cast<uintptr_t>(memory);
  auto const aligned = (address + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  memory = reinterpret_cast<char*>(aligned + count * sizeof(T));
  return reinterpret_cast<T*>(aligned);
}

int64_t most_groups(int32_t num_requests, int32_t max_pages) {
  return int64_t{num_requests} * (pitch(max_pages) / GROUP);
}

}  // namespace

InvertedBlocks place_inverted_blocks(char*& memory, int32_t num_tokens, int32_t num_kv_heads,
                                     int32_t num_requests, int32_t max_pages, int32_t top_k) {
  int64_t const pairs = int64_t{num_kv_heads} * num_tokens * top_k;
  int64_t const groups = num_kv_heads * most_groups(num_requests, max_pages);
  int64_t const tiles = int64_t{num_kv_heads} * num_slots(num_tokens, num_requests);
  InvertedBlocks b;
  b.queries = carve<int32_t>(memory, pairs);
  b.items = carve<KvItem>(memory, std::min(pairs, groups * GROUP));
  b.starts = carve<GroupStart>(memory, groups + 1);
  b.first_group = carve<int32_t>(memory, num_requests + 1);
  b.counts = carve<uint16_t>(memory, tiles * pitch(max_pages));
  b.ranks = carve<uint8_t>(memory, pairs);
  b.blocks = carve<int2>(memory, groups * GROUP);
  b.arrived = carve<uint32_t>(memory, 1);
  return b;
}

cudaError_t launch_invert_blocks(InvertParams const& p, InvertedBlocks const& blocks,
                                 cudaStream_t stream) {
  if (p.num_tokens == 0 || p.num_requests == 0) return cudaSuccess;
  if (p.num_tokens >= MAX_TOKENS || p.top_k > kMaxTopK || p.num_requests > kMaxPrefillRequests) {
    return cudaErrorInvalidValue;
  }
  int32_t const slots = num_slots(p.num_tokens, p.num_requests);
  size_t const mask_bytes = std::min(MASKED_BLOCKS, p.tokens.max_pages) * sizeof(uint4);
  cudaError_t status =
      cudaFuncSetAttribute(mark_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           MASKED_BLOCKS * static_cast<int>(sizeof(uint4)));
  if (status != cudaSuccess) return status;
  status = launch_behind(mark_kernel, dim3(slots, p.num_kv_heads), THREADS, mask_bytes, stream, p,
                         blocks);
  if (status != cudaSuccess) return status;
  auto const groups = p.num_kv_heads * most_groups(p.num_requests, p.tokens.max_pages);
  auto const sharing = static_cast<int32_t>(std::min<int64_t>(groups, 1024));
  status = launch_behind(count_kernel, std::max(sharing, 1), THREADS, 0, stream, p, blocks, slots);
  if (status != cudaSuccess) return status;
  int32_t const emitting = std::max<int32_t>(1, (sharing + WARPS - 1) / WARPS);
  return launch_behind(fill_kernel, slots * p.num_kv_heads + emitting, THREADS, 0, stream, p,
                       blocks, slots);
}

}  // namespace m3::kernels
