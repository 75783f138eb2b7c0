#include "kernels/cluster.cuh"
#include "kernels/invert_blocks.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/smxx_invert_chunk.h"
#include "kernels/this_device.h"

// A few thread blocks for each KV head: all read the head's selections, each inverts those of a
// range of blocks, in shared memory. A mask of the chunk's tokens for each list gives a pair's rank
// and the list's count whatever the order of the marks. How much lies before a thread block is the
// only thing that they tell each other.
namespace m3::kernels {
namespace {

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / 32;
constexpr int MAX_CLUSTER = 8;
constexpr int MAX_CHUNK_TOKENS = 384;
constexpr int MAX_PAIRS = 8192;
constexpr int PAIRS = MAX_PAIRS / THREADS;  // of a thread
constexpr int MAX_CHUNK_REQUESTS = 32;
constexpr int DYNAMIC_BYTES = 160 * 1024;

struct Request {
  int32_t first;        // token of the round
  int32_t first_block;  // of all requests' blocks, laid end to end, each request's from a run on
  int32_t shift;        // + token of the round = position
};

// Instead of a block's place: the pair has no block, or one that lies in another part.
constexpr int32_t MISSING = -1, NOT_HERE = -2;

struct Place {          // of a token
  int32_t first_block;  // of its request
  int32_t position;     // -1: padding
};
constexpr int32_t JOINED = -2;  // instead of a position

struct List {
  int32_t queries;      // of the thread block's lists before this one
  int32_t count;        // of its own
  int32_t work, items;  // before
};

struct Shared {
  alignas(16) float4 totals[MAX_CLUSTER];  // queries, work, items of each thread block, as bits
  uint64_t arrived;
  uint64_t sums[WARPS];
  Request requests[MAX_CHUNK_REQUESTS + 1];
  Place places[MAX_CHUNK_TOKENS];
};

// What a thread block's shared memory holds of its blocks.
struct Layout {
  int32_t parts;   // thread blocks of a KV head
  int32_t blocks;  // of a part, at most
  int32_t words;   // of a mask, odd: neighbouring lists then lie in different banks
};

__host__ __device__ int64_t whole_runs(int64_t blocks) {
  return (blocks + kRunBlocks - 1) / kRunBlocks * kRunBlocks;
}

Layout layout_of(InvertParams const& p) {
  int32_t const parts = MAX_CLUSTER / p.num_kv_heads;
  int64_t const blocks = p.num_requests * whole_runs(p.tokens.max_pages);
  return {parts, static_cast<int32_t>(whole_runs((blocks + parts - 1) / parts)),
          (p.num_tokens + 31) / 32 | 1};
}
int64_t dynamic_bytes(InvertParams const& p, Layout const& layout) {
  return int64_t{layout.blocks} * p.lists *
         (sizeof(List) + layout.words * (sizeof(uint32_t) + sizeof(uint16_t)));
}

// By the first warp: a request a lane.
__device__ void place_requests(InvertParams const& p, Shared& shared) {
  int const lane = threadIdx.x;
  Request mine{p.num_tokens, 0, 0};
  int32_t blocks = 0;
  if (lane < p.num_requests) {
    mine.first = first_of(p, lane);
    mine.shift = p.first_token + position_shift(p, lane);
    blocks = static_cast<int32_t>(whole_runs(num_blocks(p, lane)));
  }
  int32_t blocks_upto = blocks;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    int32_t const more_blocks = __shfl_up_sync(~0u, blocks_upto, offset);
    if (lane >= offset) blocks_upto += more_blocks;
  }
  mine.first_block = blocks_upto - blocks;
  if (lane < p.num_requests) shared.requests[lane] = mine;
  if (lane == p.num_requests - 1) {
    shared.requests[lane + 1] = {first_of(p, lane + 1), blocks_upto, 0};
  }
}

// The last request for which `before` holds; the first one's need not.
template <class Before>
__device__ int32_t last_request(InvertParams const& p, Before const& before) {
  int32_t low = 0, high = p.num_requests - 1;
  while (low < high) {
    int32_t const middle = low + (high - low + 1) / 2;
    if (before(middle)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Grid: one cluster, the parts of each KV head.
__global__ void __launch_bounds__(THREADS, 1)
    invert_chunk_kernel(InvertParams const p, InvertedBlocks const b, Layout const layout) {
  __shared__ Shared shared;
  extern __shared__ uint4 dynamic[];
  int32_t const most_lists = layout.blocks * p.lists;
  auto* const lists = reinterpret_cast<List*>(dynamic);
  auto* const masks = reinterpret_cast<uint32_t*>(lists + most_lists);
  auto* const ranks = reinterpret_cast<uint16_t*>(masks + most_lists * layout.words);
  int const thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  int const head = cluster_rank() / layout.parts, part = cluster_rank() % layout.parts;
  let_next_kernel_start();
  if (thread == 0) init_exchange(&shared.arrived);
  __syncwarp();
  cluster_arrive();
  for (int i = thread; i < most_lists * layout.words; i += THREADS) masks[i] = 0;
  wait_for_previous_kernel();

  int64_t const first_token = int64_t{head} * p.tokens.num_tokens + p.first_token;
  int32_t const* const ids = p.block_ids + first_token * p.top_k;
  int32_t const pairs = p.num_tokens * p.top_k;
  // The thread's pairs are every THREADS-th one. A block that the token does not see, or that needs
  // no list, becomes -1.
  int32_t id[PAIRS];
#pragma unroll
  for (int j = 0; j < PAIRS; ++j) {
    int32_t const i = thread + j * THREADS;
    id[j] = i < pairs ? ids[i] : -1;
  }

  if (warp == 0) place_requests(p, shared);
  __syncthreads();
  Request const& end = shared.requests[p.num_requests];
  auto const per_part =
      static_cast<int32_t>(whole_runs((end.first_block + layout.parts - 1) / layout.parts));
  int32_t const first_block = part * per_part;
  int32_t const num_blocks = max(0, min(per_part, end.first_block - first_block));
  for (int t = thread; t < p.num_tokens; t += THREADS) {
    int32_t const r = last_request(p, [&](int i) { return shared.requests[i].first <= t; });
    Request const& request = shared.requests[r];
    bool const real = t >= request.first && t < shared.requests[r + 1].first;
    int32_t position = real ? max(-1, t + request.shift) : -1;
    if (real && is_joined(p, head, r, t)) position = JOINED;
    shared.places[t] = {request.first_block - first_block, position};
  }
  auto const page_at = [&](int32_t at, int32_t& request, int32_t& block) {
    int32_t const of_all = first_block + at;
    request = last_request(p, [&](int i) { return shared.requests[i].first_block <= of_all; });
    block = of_all - shared.requests[request].first_block;
    return page_of(p.tokens, request, block);
  };
  auto const is_missing = [&](int32_t at) {
    int32_t request, block;
    return page_at(at, request, block) < 0;
  };
  bool missing = false;
  for (int32_t at = thread; at < num_blocks; at += THREADS) missing |= is_missing(at);
  __syncthreads();

  Divider const token_of(p.top_k);
  // Calls f(j, pair, token) for the pairs of a warp, side by side; the last ones may not exist.
  auto const each_pair = [&](auto const& f) {
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      int32_t const i = thread + j * THREADS;
      if (i - lane < pairs) f(j, i, min(token_of(i), p.num_tokens - 1));
    }
  };
  each_pair([&](int j, int32_t, int32_t token) {
    int32_t const position = shared.places[token].position;
    // The largest block that it sees; -1 of padding.
    int32_t const last = min(position >= 0 ? position / kBlockSize : -1, p.tokens.max_pages - 1);
    if (id[j] > last) id[j] = -1;
  });

  each_pair([&](int j, int32_t, int32_t token) {
    if (id[j] < 0) {
      id[j] = part == 0 ? MISSING : NOT_HERE;
      return;
    }
    int32_t const at = id[j] + shared.places[token].first_block;
    id[j] = at >= 0 && at < num_blocks ? at : NOT_HERE;
    if (id[j] < 0) return;
    atomicOr(masks + first_list(p, at) * layout.words + token / 32, 1u << token % 32);
  });
  missing = __syncthreads_or(missing);

  for (int32_t at = thread; missing && at < num_blocks; at += THREADS) {
    if (!is_missing(at)) continue;
    for (int w = 0; w < layout.words; ++w) masks[first_list(p, at) * layout.words + w] = 0;
  }
  if (missing) __syncthreads();
  int const used_words = (p.num_tokens + 31) / 32;
  if (p.lists == 2) form_pairs<THREADS>(masks, layout.words, used_words, num_blocks);
  // Queries, work and items before a list, in 24, 20 and 20 bits.
  uint64_t before = 0;
  int32_t const num_lists = first_list(p, num_blocks);
  for (int32_t first = 0; first < num_lists; first += THREADS) {
    int32_t const list = first + thread;
    int32_t count = 0;
    for (int w = 0; list < num_lists && w < used_words; ++w) {
      ranks[list * layout.words + w] = static_cast<uint16_t>(count);
      count += __popc(masks[list * layout.words + w]);
    }
    uint64_t const mine =
        uint64_t(count) | uint64_t(work_of(p, list, count)) << 24 | uint64_t(count > 0) << 44;
    uint64_t total;
    uint64_t const here = before + block_scan<WARPS>(mine, shared.sums, total);
    if (list < num_lists) {
      lists[list] = {static_cast<int32_t>(here & 0xFFFFFF), count,
                     static_cast<int32_t>(here >> 24 & 0xFFFFF), static_cast<int32_t>(here >> 44)};
    }
    before += total;
  }

  int const size = cluster_size(), rank = cluster_rank();
  __syncwarp();
  cluster_wait();  // all have started
  if (thread == 0) expect_exchange(&shared.arrived, size * static_cast<int>(sizeof(float4)));
  if (thread < size) {
    float4 const totals = {__int_as_float(static_cast<int32_t>(before & 0xFFFFFF)),
                           __int_as_float(static_cast<int32_t>(before >> 24 & 0xFFFFF)),
                           __int_as_float(static_cast<int32_t>(before >> 44)), 0.f};
    store_remote(&shared.totals[rank], &shared.arrived, thread, totals);
  }
  wait_exchange(&shared.arrived, 0);
  ListSums start{};
  for (int i = 0; i < rank; ++i) {
    start.queries += __float_as_int(shared.totals[i].x);
    start.work += __float_as_int(shared.totals[i].y);
    start.items += __float_as_int(shared.totals[i].z);
  }
  if (thread == 0) {
    if (part == 0) {
      b.heads[head] = start;
      b.parts_taken[head] = 0;
    }
    if (rank == size - 1) {
      b.heads[p.num_kv_heads] = {start.queries + __float_as_int(shared.totals[rank].x),
                                 start.work + __float_as_int(shared.totals[rank].y),
                                 start.items + __float_as_int(shared.totals[rank].z), 0};
    }
  }
  __syncthreads();  // the lists are described

  for (int32_t list = thread; list < num_lists; list += THREADS) {
    List const& own = lists[list];
    if (own.count == 0) continue;
    int32_t const at = block_of(p, list);
    bool const pair = is_pair_list(p, list);
    auto const exists = [&](int32_t other) { return other >= 0 && lists[other].count > 0; };
    int32_t request, block;
    KvItem item;
    item.page = page_at(at, request, block);
    item.head = static_cast<int16_t>(head);
    item.first_query = start.queries + own.queries;
    item.num_queries = own.count;
    item.first_work = start.work + own.work;
    item.visible =
        min(kBlockSize * (1 + pair), p.tokens.sequence_length[request] - block * kBlockSize);
    item.limit = position_shift(p, request) + 1 - block * kBlockSize;
    item.second_page = pair ? page_of(p.tokens, request, block + 1) : -1;
    item.continues = p.lists == 2 && (exists(2 * at - 1) || (pair && exists(2 * at)));
    b.items[start.items + own.items] = item;
  }
  each_pair([&](int j, int32_t i, int32_t token) {
    bool missing = id[j] == MISSING && i < pairs;
    if (id[j] >= 0) {
      int32_t list = first_list(p, id[j]), word = list * layout.words + token / 32;
      uint32_t const bit = 1u << token % 32;
      if (p.lists == 2 && (masks[word] & bit) == 0) {
        ++list;
        word += layout.words;
      }
      missing = (masks[word] & bit) == 0;
      if (!missing) {
        b.queries[start.queries + lists[list].queries + ranks[word] +
                  __popc(masks[word] & (bit - 1))] = i;
      }
    }
    uint32_t const cleared = __ballot_sync(~0u, missing);
    if (cleared == 0) return;
    bool const begins = shared.places[token].position == JOINED && i == token * p.top_k;
    clear_lse(p, int64_t{head} * pairs + i - lane, cleared, __ballot_sync(~0u, begins));
  });
}

}  // namespace

bool takes_invert_chunk(InvertParams const& p) {
  if (p.num_tokens > MAX_CHUNK_TOKENS || p.num_requests > MAX_CHUNK_REQUESTS ||
      p.num_tokens * p.top_k > MAX_PAIRS || p.num_kv_heads > MAX_CLUSTER ||
      dynamic_bytes(p, layout_of(p)) > DYNAMIC_BYTES) {
    return false;
  }
  int major = 0, most = 0;
  return read_attribute(major, cudaDevAttrComputeCapabilityMajor) == cudaSuccess && major >= 9 &&
         read_attribute(most, cudaDevAttrMaxSharedMemoryPerBlockOptin) == cudaSuccess &&
         most >= DYNAMIC_BYTES && compiled_version(invert_chunk_kernel) >= 90;
}

cudaError_t launch_invert_chunk(InvertParams const& p, InvertedBlocks const& blocks,
                                cudaStream_t stream) {
  Layout const layout = layout_of(p);
  cudaError_t const status = cudaFuncSetAttribute(
      invert_chunk_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, DYNAMIC_BYTES);
  if (status != cudaSuccess) return status;
  int const cluster = layout.parts * p.num_kv_heads;
  return launch_clusters_behind(invert_chunk_kernel, cluster, dim3(cluster), dim3(THREADS),
                                dynamic_bytes(p, layout), stream, p, blocks, layout);
}

}  // namespace m3::kernels
