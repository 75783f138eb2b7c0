#include <algorithm>

#include "kernels/invert_blocks.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/smxx_invert_chunk.h"

// Three kernels, each over all KV heads. (1) Tiles of up to 128 tokens of one request mark in
// shared memory which of them chose a block: a mask of 128 bits for each list of a block, which
// gives a pair's rank and the tile's counts whatever the order of the marks. (2) Counts are summed
// over the tiles, groups of 32 lists at a time. (3) Every query goes to its place, every list that
// has some becomes an item, behind those of the groups before, which each thread block adds up.
namespace m3::kernels {
namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int TILE_TOKENS = 128;
constexpr int GROUP = 32;           // lists
constexpr int MASKED_LISTS = 6144;  // that a thread block marks: 96 KB
constexpr int FEW_TOKENS = 2048;    // up to so many, thread blocks mark so few:
constexpr int FEW_MASKED_BLOCKS = 1024;
static_assert(MASKED_LISTS / 2 % kRunBlocks == 0 && FEW_MASKED_BLOCKS % kRunBlocks == 0,
              "no run of blocks lies in two thread blocks");
constexpr uint16_t NO_LIST = 0xFFFF;
constexpr int MAX_TOKENS = 1 << 16;  // counts are 16 bits wide
constexpr int MARK_THREADS = 512;
constexpr int MARK_WARPS = MARK_THREADS / 32;
constexpr int MAX_PAIRS = TILE_TOKENS * kMaxTopK / MARK_THREADS;  // of a marking thread
constexpr int WORDS = TILE_TOKENS / 32;

__host__ __device__ int32_t num_slots(int32_t num_tokens, int32_t num_requests) {
  return num_tokens / TILE_TOKENS + num_requests;
}
__host__ __device__ int32_t pitch(int32_t max_pages, int32_t lists) {
  return (max_pages * lists + GROUP - 1) / GROUP * GROUP;
}

__device__ int32_t groups_of(InvertParams const& p, int32_t request) {
  return (first_list(p, num_blocks(p, request)) + GROUP - 1) / GROUP;
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

// Of the requests: groups of lists that come before.
__device__ void place_requests(InvertParams const& p, InvertedBlocks const& b) {
  __shared__ int32_t sums[MARK_WARPS];
  int32_t before = 0;
  for (int32_t first = 0; first <= p.num_requests; first += MARK_THREADS) {
    int32_t const r = first + threadIdx.x;
    int32_t const groups = r < p.num_requests ? groups_of(p, r) : 0;
    int32_t total;
    int32_t const here = block_scan<MARK_WARPS>(groups, sums, total);
    if (r <= p.num_requests) b.first_group[r] = before + here;
    before += total;
  }
  for (int h = threadIdx.x; h < p.num_kv_heads; h += MARK_THREADS) b.parts_taken[h] = 0;
}

// Bits of the tile's tokens that the lists leave out; by all threads of the block.
__device__ void find_joined(InvertParams const& p, TokenTile const& tile, int head,
                            uint32_t (&joined)[WORDS]) {
  int const token = threadIdx.x;
  if (token < TILE_TOKENS) {
    bool const is = token < tile.count && is_joined(p, head, tile.request, tile.first + token);
    uint32_t const word = __ballot_sync(~0u, is);
    if (token % 32 == 0) joined[token / 32] = word;
  }
  __syncthreads();
}

// Grid: (slots, KV heads, ranges of `range` blocks).
__global__ void __launch_bounds__(MARK_THREADS, 2)
    mark_kernel(InvertParams const p, InvertedBlocks const b, int32_t range) {
  extern __shared__ uint4 masks[];  // bit i of a list: the tile's token i is in it
  let_next_kernel_start();
  if (!p.behind_join) wait_for_previous_kernel();
  if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0) place_requests(p, b);
  TokenTile const tile = token_tile(p, blockIdx.x);
  int const head = blockIdx.y;
  int32_t const blocks = num_blocks(p, tile.request);
  int32_t const base = static_cast<int32_t>(blockIdx.z) * range;
  if (tile.count == 0 || (base > 0 && base >= blocks)) {
    wait_for_previous_kernel();
    return;
  }
  int32_t const first_position = p.first_token + tile.first + position_shift(p, tile.request);
  int64_t const first_token = int64_t{head} * p.tokens.num_tokens + p.first_token + tile.first;
  int32_t const* const ids = p.block_ids + first_token * p.top_k;
  uint16_t* const ranks = b.ranks + (int64_t{head} * p.num_tokens + tile.first) * p.top_k;
  int64_t const slot = int64_t{head} * gridDim.x + blockIdx.x;
  uint16_t* const counts = b.counts + slot * pitch(p.tokens.max_pages, p.lists);
  int const pairs = tile.count * p.top_k;
  Divider const token_of(p.top_k);

  int32_t id[MAX_PAIRS];
#pragma unroll
  for (int j = 0; j < MAX_PAIRS; ++j) {
    int const i = threadIdx.x + j * MARK_THREADS;
    id[j] = i < pairs ? ids[i] : -1;
  }
  int32_t const here = min(range, blocks - base);
  bool missing = false;  // a page
  for (int i = threadIdx.x; i < here; i += MARK_THREADS) {
    missing |= page_of(p.tokens, tile.request, base + i) < 0;
  }
  int const lists = first_list(p, here);
  for (int i = threadIdx.x; i < lists; i += MARK_THREADS) masks[i] = make_uint4(0, 0, 0, 0);
  __shared__ uint32_t joined[WORDS];
  wait_for_previous_kernel();
  find_joined(p, tile, head, joined);
#pragma unroll
  for (int j = 0; j < MAX_PAIRS; ++j) {
    int const token = token_of(threadIdx.x + j * MARK_THREADS);
    if (id[j] >= blocks || id[j] * kBlockSize > first_position + token) id[j] = -1;
    if (id[j] >= 0 && (joined[token / 32] >> token % 32 & 1) != 0) id[j] = -1;
  }

#pragma unroll
  for (int j = 0; j < MAX_PAIRS; ++j) {
    int const token = token_of(threadIdx.x + j * MARK_THREADS);
    if (id[j] < base || id[j] >= base + here) continue;
    atomicOr(reinterpret_cast<uint32_t*>(masks + first_list(p, id[j] - base)) + token / 32,
             1u << token % 32);
  }
  missing = __syncthreads_or(missing);
  for (int i = threadIdx.x; missing && i < here; i += MARK_THREADS) {
    if (page_of(p.tokens, tile.request, base + i) < 0) {
      masks[first_list(p, i)] = make_uint4(0, 0, 0, 0);
    }
  }
  if (missing) __syncthreads();
  if (p.lists == 2) form_pairs<MARK_THREADS>(masks, 1, 1, here);
#pragma unroll
  for (int j = 0; j < MAX_PAIRS; ++j) {
    int const i = threadIdx.x + j * MARK_THREADS, token = token_of(i);
    if (i < pairs && id[j] < 0 && base == 0) ranks[i] = NO_LIST;
    if (id[j] < base || id[j] >= base + here) continue;
    uint4 const* list = masks + first_list(p, id[j] - base);
    auto const in_list = [&] {
      uint32_t const word = reinterpret_cast<uint32_t const*>(list)[token / 32];
      return (word >> token % 32 & 1) != 0;
    };
    int rank = 0;
    if (p.lists == 2 && !in_list()) {
      ++list;
      rank = 1 << 8;
    }
    uint32_t const words[WORDS] = {list->x, list->y, list->z, list->w};
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
      uint32_t const before = w < token / 32 ? ~0u : w > token / 32 ? 0u : (1u << token % 32) - 1;
      rank += __popc(words[w] & before);
    }
    ranks[i] = in_list() ? static_cast<uint16_t>(rank) : NO_LIST;
  }
  for (int i = threadIdx.x; i < lists; i += MARK_THREADS) {
    uint4 const mask = masks[i];
    counts[first_list(p, base) + i] =
        static_cast<uint16_t>(__popc(mask.x) + __popc(mask.y) + __popc(mask.z) + __popc(mask.w));
  }
}

struct BlockGroup {
  int32_t head, request, first_list;
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

// Grid: thread blocks that share the groups. A warp has a group, or with `kShared` a share of the
// tiles of a group's request; a lane a list.
template <bool kShared>
__global__ void __launch_bounds__(THREADS)
    count_kernel(InvertParams const p, InvertedBlocks const b, int32_t slots) {
  __shared__ int32_t segment[WARPS][GROUP];
  let_next_kernel_start();
  wait_for_previous_kernel();
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int const part = kShared ? warp : 0, parts = kShared ? WARPS : 1;
  int const first = kShared ? blockIdx.x : blockIdx.x * WARPS + warp;
  int32_t const groups = b.first_group[p.num_requests];
  int32_t const width = pitch(p.tokens.max_pages, p.lists);
  for (int32_t g = first; g < p.num_kv_heads * groups; g += gridDim.x * WARPS / parts) {
    BlockGroup const group = block_group(p, b, groups, g);
    int32_t const list = group.first_list + lane;
    bool const exists = list < first_list(p, num_blocks(p, group.request));
    int32_t const begin = first_of(p, group.request);
    int32_t const tokens = first_of(p, group.request + 1) - begin;
    int32_t const tiles = (tokens + TILE_TOKENS - 1) / TILE_TOKENS;
    int32_t const share = (tiles + parts - 1) / parts;
    int32_t const from = part * share, to = min(tiles, from + share);
    int64_t const slot = int64_t{group.head} * slots + begin / TILE_TOKENS + group.request;
    uint16_t* const counts = b.counts + slot * width + list;
    int32_t sum = 0;
    if (exists) {
#pragma unroll 8
      for (int32_t t = from; t < to; ++t) sum += counts[int64_t{t} * width];
    }
    int32_t before = 0, total = sum;
    if (kShared) {
      segment[warp][lane] = sum;
      __syncthreads();
      total = 0;
      for (int w = 0; w < WARPS; ++w) {
        if (w < warp) before += segment[w][lane];
        total += segment[w][lane];
      }
    }
    if (exists) {
#pragma unroll 8
      for (int32_t t = from; t < to; ++t) {
        int32_t const count = counts[int64_t{t} * width];
        counts[int64_t{t} * width] = static_cast<uint16_t>(before);
        before += count;
      }
    }
    if (part == 0) {
      int32_t inclusive = total;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        int32_t const other = __shfl_up_sync(~0u, inclusive, offset);
        if (lane >= offset) inclusive += other;
      }
      b.blocks[int64_t{g} * GROUP + lane] = make_int2(total, inclusive - total);
      int32_t const work = __reduce_add_sync(~0u, work_of(p, list, total));
      int32_t const items = __popc(__ballot_sync(~0u, total > 0));
      if (lane == 31) b.groups[g] = {inclusive, work, items, 0};
    }
    if (kShared) __syncthreads();
  }
}

__device__ void add(ListSums& sum, ListSums const& more) {
  sum.queries += more.queries;
  sum.work += more.work;
  sum.items += more.items;
}

// The sums of the groups before one; by all threads of the block.
__device__ ListSums sum_before(InvertedBlocks const& b, int32_t group) {
  __shared__ ListSums sums[WARPS];
  ListSums sum{};
#pragma unroll 4
  for (int32_t g = threadIdx.x; g < group; g += THREADS) add(sum, b.groups[g]);
  sum = {__reduce_add_sync(~0u, sum.queries), __reduce_add_sync(~0u, sum.work),
         __reduce_add_sync(~0u, sum.items), 0};
  __syncthreads();  // those of an earlier call have been read
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = {};
#pragma unroll
  for (ListSums const& warp : sums) add(sum, warp);
  return sum;
}

// The queries before each group of a request, whose groups begin with `first`; by all threads of
// the block.
__device__ void sum_request(InvertedBlocks const& b, int32_t first, int32_t count,
                            int32_t* starts) {
  __shared__ int32_t sums[WARPS];
  int32_t before = sum_before(b, first).queries;
  for (int32_t at = 0; at < count; at += THREADS) {
    int32_t const g = at + threadIdx.x;
    int32_t total;
    int32_t const here =
        block_scan<WARPS>(g < count ? b.groups[first + g].queries : 0, sums, total);
    if (g < count) starts[g] = before + here;
    before += total;
  }
  __syncthreads();
}

__device__ void place_queries(InvertParams const& p, InvertedBlocks const& b, int32_t slots,
                              int32_t slot, int head) {
  TokenTile const tile = token_tile(p, slot);
  if (tile.count == 0) return;
  int32_t const groups = b.first_group[p.num_requests];
  int32_t const first_group = head * groups + b.first_group[tile.request];
  int32_t const first_position = p.first_token + tile.first + position_shift(p, tile.request);
  int64_t const first_token = int64_t{head} * p.tokens.num_tokens + p.first_token + tile.first;
  int32_t const* const ids = p.block_ids + first_token * p.top_k;
  int64_t const first_pair = (int64_t{head} * p.num_tokens + tile.first) * p.top_k;
  uint16_t const* const counts =
      b.counts + (int64_t{head} * slots + slot) * pitch(p.tokens.max_pages, p.lists);
  int const pairs = tile.count * p.top_k;
  extern __shared__ int32_t group_starts[];
  __shared__ uint32_t joined[WORDS];
  Divider const token_of(p.top_k);
  constexpr int DEPTH = 8;  // pairs of a thread under way at once
  for (int first = 0; first < pairs; first += DEPTH * THREADS) {
    int32_t id[DEPTH], at[DEPTH];
    uint16_t rank[DEPTH];
    uint32_t left_out = 0;  // bit j: pair j
#pragma unroll
    for (int j = 0; j < DEPTH; ++j) {
      int const i = first + j * THREADS + threadIdx.x;
      id[j] = i < pairs ? ids[i] : -1;
      rank[j] = i < pairs ? b.ranks[first_pair + i] : NO_LIST;
    }
    if (first == 0) {
      find_joined(p, tile, head, joined);
      sum_request(b, first_group, groups_of(p, tile.request), group_starts);
    }
#pragma unroll
    for (int j = 0; j < DEPTH; ++j) {
      int const i = first + j * THREADS + threadIdx.x, token = token_of(i);
      if (i < pairs) left_out |= (joined[token / 32] >> token % 32 & 1) << j;
      at[j] = -1;
      if (rank[j] != NO_LIST) {
        int32_t const list = first_list(p, id[j]) + (rank[j] >> 8);
        at[j] = group_starts[list / GROUP] + b.blocks[int64_t{first_group} * GROUP + list].y +
                counts[list] + (rank[j] & 255);
      }
    }
#pragma unroll
    for (int j = 0; j < DEPTH; ++j) {
      int const i = first + j * THREADS + threadIdx.x;
      if (at[j] >= 0) b.queries[at[j]] = tile.first * p.top_k + i;
      bool const is_left_out = (left_out >> j & 1) != 0, begins = i % p.top_k == 0;
      uint32_t const missing =
          __ballot_sync(~0u, i < pairs && at[j] < 0 && (begins || !is_left_out));
      uint32_t const begun = __ballot_sync(~0u, begins && is_left_out);
      clear_lse(p, first_pair + i - threadIdx.x % 32, missing, begun);
    }
  }
}

__device__ void place_items(InvertParams const& p, InvertedBlocks const& b, int32_t g,
                            ListSums const& start) {
  int const lane = threadIdx.x % 32;
  int32_t const groups = b.first_group[p.num_requests];
  BlockGroup const group = block_group(p, b, groups, g);
  int2 const queries = b.blocks[int64_t{g} * GROUP + lane];
  int32_t const last = group.first_list > 0 ? b.blocks[int64_t{g} * GROUP - 1].x : 0;
  int32_t const list = group.first_list + lane, block = block_of(p, list);
  bool const pair = is_pair_list(p, list);
  int32_t const work = work_of(p, list, queries.x);
  int32_t before = work;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    int32_t const other = __shfl_up_sync(~0u, before, offset);
    if (lane >= offset) before += other;
  }
  uint32_t const used = __ballot_sync(~0u, queries.x > 0);
  // Bit i + 1: list i of the group has queries; bit 0: the one before them.
  uint64_t const with_last = uint64_t{used} << 1 | uint64_t(last > 0);
  if (queries.x == 0) return;
  KvItem item;
  item.page = page_of(p.tokens, group.request, block);
  item.head = static_cast<int16_t>(group.head);
  // The list before ends with this block, or, of a pair, the one before that.
  item.continues = p.lists == 2 && (with_last >> (pair ? lane - 1 : lane) & (pair ? 3 : 1)) != 0;
  item.first_query = start.queries + queries.y;
  item.num_queries = queries.x;
  item.first_work = start.work + before - work;
  item.visible =
      min(kBlockSize * (1 + pair), p.tokens.sequence_length[group.request] - block * kBlockSize);
  item.limit = position_shift(p, group.request) + 1 - block * kBlockSize;
  item.second_page = pair ? page_of(p.tokens, group.request, block + 1) : -1;
  b.items[start.items + __popc(used & ((1u << lane) - 1))] = item;
}

// Grid: slots of every KV head, then thread blocks that share the groups.
__global__ void __launch_bounds__(THREADS)
    fill_kernel(InvertParams const p, InvertedBlocks const b, int32_t slots) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  int32_t const tiles = slots * p.num_kv_heads;
  if (static_cast<int32_t>(blockIdx.x) < tiles) {
    place_queries(p, b, slots, blockIdx.x % slots, blockIdx.x / slots);
    return;
  }
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int32_t const groups = b.first_group[p.num_requests], count = p.num_kv_heads * groups;
  int32_t const block = blockIdx.x - tiles, blocks = gridDim.x - tiles;
  if (count == 0 && block == 0 && threadIdx.x <= p.num_kv_heads) b.heads[threadIdx.x] = {};
  for (int32_t first = block * WARPS; first < count; first += blocks * WARPS) {
    ListSums start = sum_before(b, first);
    int32_t const g = first + warp;
    if (g >= count) continue;
    for (int32_t i = first; i < g; ++i) add(start, b.groups[i]);
    if (lane == 0 && g % groups == 0) b.heads[g / groups] = start;
    place_items(p, b, g, start);
    add(start, b.groups[g]);
    if (lane == 0 && g == count - 1) b.heads[p.num_kv_heads] = start;
  }
}

int64_t most_groups(int32_t num_requests, int32_t max_pages, int32_t lists) {
  return int64_t{num_requests} * (pitch(max_pages, lists) / GROUP);
}

}  // namespace

InvertedBlocks place_inverted_blocks(Carver& carver, int32_t num_tokens, int32_t num_kv_heads,
                                     int32_t num_requests, int32_t max_pages, int32_t top_k,
                                     int32_t lists) {
  int64_t const pairs = int64_t{num_kv_heads} * num_tokens * top_k;
  int64_t const groups = num_kv_heads * most_groups(num_requests, max_pages, lists);
  int64_t const tiles = int64_t{num_kv_heads} * num_slots(num_tokens, num_requests);
  InvertedBlocks b;
  carver.take(b.queries, pairs);
  carver.take(b.items, std::min(pairs, groups * GROUP));
  carver.take(b.heads, num_kv_heads + 1);
  carver.take(b.parts_taken, num_kv_heads);
  carver.take(b.first_group, num_requests + 1);
  carver.take(b.counts, tiles * pitch(max_pages, lists));
  carver.take(b.ranks, pairs);
  carver.take(b.blocks, groups * GROUP);
  carver.take(b.groups, groups);
  return b;
}

cudaError_t launch_invert_blocks(InvertParams const& p, InvertedBlocks const& blocks,
                                 cudaStream_t stream) {
  if (p.num_tokens == 0 || p.num_requests == 0) return cudaSuccess;
  if (p.num_tokens >= MAX_TOKENS || p.top_k > kMaxTopK || p.num_requests > kMaxPrefillRequests) {
    return cudaErrorInvalidValue;
  }
  if (takes_invert_chunk(p)) return launch_invert_chunk(p, blocks, stream);
  int32_t const slots = num_slots(p.num_tokens, p.num_requests);
  int32_t const range = p.num_tokens <= FEW_TOKENS ? FEW_MASKED_BLOCKS : MASKED_LISTS / p.lists;
  size_t const mask_bytes = std::min(range, p.tokens.max_pages) * p.lists * sizeof(uint4);
  dim3 const marking(slots, p.num_kv_heads, std::max(1, (p.tokens.max_pages + range - 1) / range));
  cudaError_t status = cudaFuncSetAttribute(
      mark_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(mask_bytes));
  if (status != cudaSuccess) return status;
  status = launch_behind(mark_kernel, marking, MARK_THREADS, mask_bytes, stream, p, blocks, range);
  if (status != cudaSuccess) return status;
  auto const groups = p.num_kv_heads * most_groups(p.num_requests, p.tokens.max_pages, p.lists);
  bool const shared = p.num_tokens > WARPS * TILE_TOKENS;
  int64_t const counting = shared ? groups : (groups + WARPS - 1) / WARPS;
  auto const sharing = static_cast<int32_t>(std::min<int64_t>(groups, 4096));
  status = launch_behind(shared ? count_kernel<true> : count_kernel<false>,
                         static_cast<int32_t>(std::clamp<int64_t>(counting, 1, 1024)), THREADS, 0,
                         stream, p, blocks, slots);
  if (status != cudaSuccess) return status;
  int32_t const emitting = std::max<int32_t>(1, (sharing + WARPS - 1) / WARPS);
  size_t const start_bytes = pitch(p.tokens.max_pages, p.lists) / GROUP * sizeof(int32_t);
  return launch_behind(fill_kernel, slots * p.num_kv_heads + emitting, THREADS, start_bytes, stream,
                       p, blocks, slots);
}

}  // namespace m3::kernels
