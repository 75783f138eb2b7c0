#include <cstddef>
#include <cstdint>
#include <limits>

#include "kernels/programmatic_launch.cuh"
#include "kernels/sm90_sparse_prefill_tiles.cuh"
#include "kernels/tensor_map.h"
#include "kernels/this_device.h"

// Thread blocks share the work on tiles of 64 query rows of a round, in the order of the KV blocks,
// and keep a KV block, or two neighbouring ones, while they go through their tiles. Warpgroups take
// the tiles in turn: one's softmax and stores run under the others' products.
namespace m3::kernels {
namespace {

using namespace sparse_prefill;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Slots behind the sequence may hold NaN, and 0 * NaN would reach the sum.
__device__ void clear_values(uint8_t* values, int first_key) {
  auto* const v = reinterpret_cast<uint4*>(values);
  constexpr int CHUNKS = 128 / 16;  // of a row of 64 channels; the swizzle stays within it
  for (int i = threadIdx.x % 32; i < (KEYS - first_key) * CHUNKS; i += 32) {
    v[first_key * CHUNKS + i] = make_uint4(0, 0, 0, 0);
    v[HALF_KV / 16 + first_key * CHUNKS + i] = make_uint4(0, 0, 0, 0);
  }
  ptx::fence_async_proxy();
  __syncwarp();
}

// An item's record as a warp holds it, a word a lane.
enum Field {
  kPage,
  kHeadAndContinues,
  kFirstQuery,
  kNumQueries,
  kFirstWork,
  kVisible,
  kLimit,
  kSecondPage,
  kNumFields
};
static_assert(offsetof(KvItem, first_work) == kFirstWork * sizeof(int32_t) &&
                  offsetof(KvItem, second_page) == kSecondPage * sizeof(int32_t) &&
                  sizeof(KvItem) == kNumFields * sizeof(int32_t),
              "fields in their order");
__device__ int32_t field(int32_t record, Field which) {
  return __shfl_sync(~0u, record, which);
}

// A KV block that a warp brings, the number-th one of the thread block.
struct Block {
  int32_t number, head, page;
  int32_t keys;       // that exist
  int32_t num_tiles;  // that see it

  // Of consumers that have none of these tiles.
  template <class S>
  __device__ int idle_warps() const {
    return max(0, S::CONSUMERS - num_tiles) * WARPS;
  }
};

__device__ void load_half(CUtensorMap const& kv_map, uint8_t* to, uint32_t barrier,
                          Block const& block, int part) {  // 0: keys, 1: values
  ptx::barrier_expect(barrier, KV_BYTES);
  for (int half = 0; half < 2; ++half) {
    sm90::load_tile(ptx::shared_address(to) + half * HALF_KV, &kv_map, barrier, half * 64,
                    block.head, 0, 2 * block.page + part);
  }
}

template <class S>
__device__ void load_keys(S& shared, CUtensorMap const& kv_map, Block const& block) {
  int const s = block.number % S::KV_STAGES, lane = threadIdx.x % 32;
  int const parity = ~(block.number / S::KV_STAGES) & 1;
  uint32_t const k_empty = ptx::shared_address(&shared.k_empty[s]);
  ptx::barrier_wait(k_empty, parity);
  // So that a consumer that has a tile of this block cannot take the values before for its own: it
  // looks at the keys first.
  ptx::barrier_wait(ptx::shared_address(&shared.v_full[s]), parity);
  if (lane < block.idle_warps<S>()) ptx::barrier_arrive(k_empty);
  if (lane == 0) {
    load_half(kv_map, shared.k[s], ptx::shared_address(&shared.k_full[s]), block, 0);
  }
}

template <class S>
__device__ void load_values(S& shared, CUtensorMap const& kv_map, Block const& block,
                            int& landed_parity) {
  int const s = block.number % S::KV_STAGES, lane = threadIdx.x % 32;
  uint32_t const v_full = ptx::shared_address(&shared.v_full[s]);
  uint32_t const v_empty = ptx::shared_address(&shared.v_empty[s]);
  uint32_t const v_landed = ptx::shared_address(&shared.v_landed);
  bool const partial = block.keys < KEYS;
  ptx::barrier_wait(v_empty, ~(block.number / S::KV_STAGES) & 1);
  if (lane < block.idle_warps<S>()) ptx::barrier_arrive(v_empty);
  if (lane == 0) load_half(kv_map, shared.v[s], partial ? v_landed : v_full, block, 1);
  if (!partial) return;
  ptx::barrier_wait(v_landed, landed_parity);
  landed_parity ^= 1;
  clear_values(shared.v[s], block.keys);
  if (lane == 0) ptx::barrier_arrive(v_full);
}

// What a producing warp has brought.
struct Progress {
  int32_t tiles, blocks;
  int landed_parity;
};

// Waits for the room for the next tile: its consumer and stage.
template <class S>
__device__ void wait_stage(S& shared, int32_t tile, int& c, int& stage) {
  int const turn = tile / S::CONSUMERS;
  c = tile % S::CONSUMERS;
  stage = turn % S::Q_STAGES;
  ptx::barrier_wait(ptx::shared_address(&shared.q_empty[c][stage]), ~(turn / S::Q_STAGES) & 1);
}

// One warp: brings keys and values of a share's items, the queries of their tiles, or both. What it
// reads ahead lies in its lanes: 32 queries, the 32 behind them, and the records of the next three
// items.
template <class S, bool kKeys, bool kQueries>
__device__ void produce_share(SparsePrefillParams const& p, SparsePrefillRound const& r,
                              CUtensorMap const& q_map, CUtensorMap const& kv_map,
                              Sizes const& sizes, S& shared, Share const& share, Progress& so_far) {
  int const lane = threadIdx.x % 32;
  int const batch_tiles = 32 / sizes.tile_queries;
  // Behind the last one: an item of no share.
  auto const load_record = [&](int32_t index) {
    int32_t const none = lane == kFirstWork ? INT32_MAX : 0;
    return lane < kNumFields && index < share.items_end
               ? reinterpret_cast<int32_t const*>(r.blocks.items + index)[lane]
               : none;
  };
  auto const load_queries = [&](int32_t record, int32_t nth_tile) {
    int32_t const first = field(record, kFirstQuery), count = field(record, kNumQueries);
    int32_t const i = nth_tile * sizes.tile_queries + lane;
    return i < count ? r.blocks.queries[first + i] : -1;
  };
  auto const is_pair = [](int32_t record) { return field(record, kSecondPage) >= 0; };
  auto const continues = [](int32_t record) { return field(record, kHeadAndContinues) >> 16 != 0; };
  auto const tiles_of = [&](int32_t record) {
    return tiles_of_share(share.work, field(record, kFirstWork), field(record, kNumQueries),
                          sizes.tile_queries, is_pair(record) ? 2 : 1);
  };
  int32_t index = find_item(r, share.work.begin);
  int32_t record = load_record(index);
  TileRange tiles = tiles_of(record);
  if (tiles.begin == tiles.end) {
    record = load_record(++index);
    tiles = tiles_of(record);
  }
  int32_t next_record = load_record(index + 1), later_record = load_record(index + 2);
  int32_t queries = load_queries(record, tiles.begin), tokens = 0, next_queries = -1;
  int used = 0;  // tiles of `queries`
  int32_t const earlier_blocks = so_far.blocks;
  while (tiles.begin < tiles.end) {
    int32_t const head = field(record, kHeadAndContinues) & 0xFFFF;
    int32_t const visible = field(record, kVisible), limit = field(record, kLimit);
    bool const two = is_pair(record), loaded = so_far.blocks > earlier_blocks && continues(record);
    TileRange const next_tiles = tiles_of(next_record);
    int32_t const coming_record = load_record(index + 3);
    // Where the tiles of the first and of the second block end.
    int32_t const end = so_far.tiles + tiles.end - tiles.begin;
    int32_t next_end = end, second_end = end;
    if (continues(next_record)) {
      second_end = next_end = end + next_tiles.end;
      if (!is_pair(next_record) && continues(later_record)) {
        second_end += tiles_of(later_record).end;
      }
    }
    int32_t const first_end = two ? end : next_end;
    Block const first{so_far.blocks - loaded, head, field(record, kPage), visible,
                      first_end - so_far.tiles};
    Block const second{first.number + 1, head, field(record, kSecondPage), visible - KEYS,
                       second_end - so_far.tiles};
    so_far.blocks = first.number + 1 + two;
    if (kKeys) {
      // So that a consumer that sees the first block's keys cannot take the keys before the second
      // ones for these. With one producer it has no tile before.
      if (!kQueries && two && !loaded) {
        ptx::barrier_wait(ptx::shared_address(&shared.k_full[second.number % S::KV_STAGES]),
                          ~(second.number / S::KV_STAGES) & 1);
      }
      if (!loaded) load_keys(shared, kv_map, first);
      if (two) load_keys(shared, kv_map, second);
    }
    auto const load_item_values = [&] {
      if (!loaded) load_values(shared, kv_map, first, so_far.landed_parity);
      if (two) load_values(shared, kv_map, second, so_far.landed_parity);
    };
    if (!kQueries) {
      load_item_values();
      so_far.tiles = end;
    }
    // The values behind queries, for which consumers wait first; those of all consumers, since the
    // values' place may be in use for long.
    int32_t const values_behind = min(end, so_far.tiles + S::CONSUMERS) - 1;
    for (int32_t tile = tiles.begin; so_far.tiles < end; ++tile, ++so_far.tiles) {
      if (used == 0) {
        tokens = r.first_token + queries / p.top_k;
        int32_t const following = tile + batch_tiles;
        next_queries =
            following < tiles.end ? load_queries(record, following) : load_queries(next_record, 0);
      }
      int const from = (used * sizes.tile_queries + lane) % 32;
      int32_t const some_query = __shfl_sync(~0u, queries, from);
      int32_t const token = __shfl_sync(~0u, tokens, from);
      int32_t const query = lane < sizes.tile_queries ? some_query : -1;
      if (++used == batch_tiles || so_far.tiles + 1 == end) {
        queries = next_queries;
        used = 0;
      }
      int c, stage;
      wait_stage(shared, so_far.tiles, c, stage);
      TileInfo& info = shared.info[c][stage];
      if (lane < MAX_QUERIES) {
        info.query[lane] = query;
        info.limit[lane] = query < 0 ? 2 * KEYS : min(2 * KEYS, limit + token);
      }
      if (lane == 0) {
        info.block = first.number;
        info.flags = (two ? kTwoBlocks : 0) |
                     (so_far.tiles + S::CONSUMERS >= first_end ? kLastOfFirst : 0) |
                     (so_far.tiles + S::CONSUMERS >= second_end ? kLastOfSecond : 0);
        info.first_pair = first_pair_of_head(p, r, head);
      }
      int const present = __popc(__ballot_sync(~0u, query >= 0));
      uint32_t const q_full = ptx::shared_address(&shared.q_full[c][stage]);
      __syncwarp();  // the tile's description is written
      if (lane == 0) ptx::barrier_expect(q_full, present * sizes.num_row_units * EIGHT_ROWS);
      __syncwarp();
      if (query >= 0) {
        int32_t const unit = token * (p.num_heads / 8) + head * sizes.num_row_units;
        sm90::load_tile(
            ptx::shared_address(shared.q[c][stage]) + lane * sizes.num_row_units * EIGHT_ROWS,
            &q_map, q_full, 0, 0, 0, unit);
      }
      if (kKeys && so_far.tiles == values_behind) load_item_values();
    }
    record = next_record;
    next_record = later_record;
    later_record = coming_record;
    tiles = next_tiles;
    ++index;
  }
}

// Parts of a round's work: each thread block begins with some, then takes of the rest, one by one.
template <class S>
struct Parts {
  WorkShare work;
  int32_t count, own;

  __device__ explicit Parts(SparsePrefillRound const& r)
      : work(work_of_round(r)), count(S::PARTS * gridDim.x), own(S::PARTS) {
    if (work.end - work.begin >= S::LEAST_PART * count) own = S::OWN_PARTS;
  }
  __device__ int32_t first_of_rest() const { return own * gridDim.x; }
};

template <class S, bool kKeys, bool kQueries>
__device__ void produce(SparsePrefillParams const& p, SparsePrefillRound const& r,
                        CUtensorMap const& q_map, CUtensorMap const& kv_map, Sizes const& sizes,
                        S& shared) {
  int const lane = threadIdx.x % 32;
  Share& share = shared.shares[kKeys ? 0 : 1];
  Progress so_far{};
  int32_t rest = -1;  // part of the rest; -1: the thread block's own parts
  for (int32_t i = 0;; ++i) {
    Parts<S> const parts(r);
    int32_t const begin = rest < 0 ? parts.own * blockIdx.x : parts.first_of_rest() + rest;
    if (begin >= parts.count) break;
    __syncwarp();  // the share before has been read
    if (lane == 0) {
      share = {share_of(parts.work, begin, begin + (rest < 0 ? parts.own : 1), parts.count),
               last_item(r)};
    }
    __syncwarp();
    if (kKeys && lane == 0) rest = atomicAdd(r.blocks.parts_taken + r.first_head, 1);
    produce_share<S, kKeys, kQueries>(p, r, q_map, kv_map, sizes, shared, share, so_far);
    rest = __shfl_sync(~0u, rest, 0);
    if constexpr (!kQueries) shared.parts.put(i, rest);
    if constexpr (!kKeys) rest = shared.parts.get(i);
  }
  for (int i = 0; kQueries && i < S::CONSUMERS; ++i, ++so_far.tiles) {
    int c, stage;
    wait_stage(shared, so_far.tiles, c, stage);
    if (lane == 0) {
      shared.info[c][stage].block = -1;
      ptx::barrier_arrive(ptx::shared_address(&shared.q_full[c][stage]));
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// Grid: a block for each multiprocessor.
template <class S>
__global__ void __launch_bounds__(S::THREADS, 1)
    sparse_prefill_kernel(__grid_constant__ SparsePrefillParams const p,
                          __grid_constant__ SparsePrefillRound const round,
                          __grid_constant__ CUtensorMap const q_map,
                          __grid_constant__ CUtensorMap const kv_map,
                          __grid_constant__ Sizes const sizes) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<S*>(memory);
  if (threadIdx.x == 0) {
    for (int s = 0; s < S::KV_STAGES; ++s) {
      ptx::barrier_init(ptx::shared_address(&shared.k_full[s]), 1);
      ptx::barrier_init(ptx::shared_address(&shared.v_full[s]), 1);
      ptx::barrier_init(ptx::shared_address(&shared.k_empty[s]), S::CONSUMERS * WARPS);
      ptx::barrier_init(ptx::shared_address(&shared.v_empty[s]), S::CONSUMERS * WARPS);
    }
    ptx::barrier_init(ptx::shared_address(&shared.v_landed), 1);
    shared.parts.init();
    for (int c = 0; c < S::CONSUMERS; ++c) {
      for (int s = 0; s < S::Q_STAGES; ++s) {
        ptx::barrier_init(ptx::shared_address(&shared.q_full[c][s]), 1);
        ptx::barrier_init(ptx::shared_address(&shared.q_empty[c][s]), WARPS);
      }
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  wait_for_previous_kernel();
  if (threadIdx.x < WARPGROUP) {
    ptx::registers_down<S::PRODUCER_REGISTERS>();
    if constexpr (S::Q_STAGES > 1) {
      if (threadIdx.x < 32) produce<S, true, true>(p, round, q_map, kv_map, sizes, shared);
    } else if (threadIdx.x < 32) {  // keys run further ahead than queries
      produce<S, true, false>(p, round, q_map, kv_map, sizes, shared);
    } else if (threadIdx.x < 64) {
      produce<S, false, true>(p, round, q_map, kv_map, sizes, shared);
    }
  } else {
    ptx::registers_up<S::CONSUMER_REGISTERS>();
    consume(p, round, sizes, shared);
  }
#endif
}

template <class S>
cudaError_t launch(SparsePrefillParams const& p, SparsePrefillRound const& round,
                   cudaStream_t stream) {
  auto const heads = static_cast<cuuint64_t>(p.num_heads);
  int32_t const group = p.num_heads / p.num_kv_heads;
  Sizes const sizes{group, ROWS / group, group / 8};
  // A box is all channels of a token's heads of one KV head: eight rows of the first 64 channels,
  // the same rows of the others, then the next eight rows.
  CUtensorMap q_map, kv_map;
  cuuint64_t const q_dims[] = {64, 8, 2, heads / 8 * p.tokens.num_tokens};
  cuuint64_t const q_strides[] = {kHeadSize * 2, 128, EIGHT_ROWS};
  cuuint32_t const q_box[] = {64, 8, 2, static_cast<cuuint32_t>(sizes.num_row_units)};
  cudaError_t status =
      encode_tensor_map(q_map, p.q, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, q_dims, q_strides, q_box);
  if (status != cudaSuccess) return status;
  status = encode_kv_map(kv_map, p.kv_cache, p.num_kv_heads, p.num_pages);
  if (status != cudaSuccess) return status;
  auto* const kernel = sparse_prefill_kernel<S>;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(S));
  if (status != cudaSuccess) return status;
  int processors = 0;
  status = count_processors(processors);
  if (status != cudaSuccess) return status;
  return launch_behind(kernel, processors, S::THREADS, sizeof(S), stream, p, round, q_map, kv_map,
                       sizes);
}

cudaError_t attend(SparsePrefillParams const& p, SparsePrefillRound const& round,
                   cudaStream_t stream) {
  return shares_blocks(p, round.num_tokens) ? launch<Many>(p, round, stream)
                                            : launch<Few>(p, round, stream);
}

}  // namespace

bool has_sm90_sparse_prefill() {
  return runs_sm90(sparse_prefill_kernel<Many>);
}

cudaError_t launch_sm90_sparse_prefill(SparsePrefillParams const& p, SparsePrefillRounds rounds,
                                       void* workspace, cudaStream_t stream) {
  if (p.kv_scale != nullptr) return cudaErrorInvalidValue;
  return run_sparse_prefill(p, rounds, workspace, stream, attend, launch_sm90_paged_prefill,
                            std::numeric_limits<int32_t>::max(), kMostLists);
}

}  // namespace m3::kernels
