#include <cstddef>
#include <cstdint>

#include "kernels/programmatic_launch.cuh"
#include "kernels/sm90_attention_mma.cuh"
#include "kernels/sparse_prefill_items.cuh"
#include "kernels/tensor_map.h"
#include "kernels/this_device.h"

// Thread blocks share the tiles of 64 query rows of a round equally, in the order of the KV blocks,
// and keep a KV block while they go through its tiles. Warpgroups take the tiles in turn: one's
// softmax and stores run under the others' products.
namespace m3::kernels {
namespace {

constexpr int WARPGROUP = 128;
constexpr int WARPS = 4;  // of a warpgroup
constexpr int ROWS = kSparseTileRows;
constexpr int KEYS = kBlockSize;
constexpr int HALF_KV = KEYS * 128;  // bytes of the first or last 64 channels of a KV block
constexpr int KV_BYTES = 2 * HALF_KV;
constexpr int EIGHT_ROWS = 8 * kHeadSize * 2;  // of queries: both halves, one behind the other
constexpr int Q_BYTES = ROWS / 8 * EIGHT_ROWS;
constexpr int MAX_QUERIES = ROWS / 8;  // of a tile

struct TileInfo {
  int32_t query[MAX_QUERIES];  // place among the round's pairs; -1: none
  int32_t limit[MAX_QUERIES];  // keys of the block that it sees
  int32_t item;                // of the thread block
  int32_t last;                // whether the consumer has no further tile of the item
  int64_t first_pair;          // of the item's head
};

// kQueryStages: of each consumer, a warpgroup.
template <int kConsumers, int kKvStages, int kQueryStages>
struct __align__(1024) Shared {
  static constexpr int CONSUMERS = kConsumers;
  static constexpr int KV_STAGES = kKvStages;
  static constexpr int Q_STAGES = kQueryStages;
  static constexpr int THREADS = WARPGROUP * (1 + CONSUMERS);
  // Registers of a thread: three consumers leave 160 for each.
  static constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 40;
  static constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 232;
  uint8_t k[KV_STAGES][KV_BYTES];
  uint8_t v[KV_STAGES][KV_BYTES];
  uint8_t q[CONSUMERS][Q_STAGES][Q_BYTES];
  TileInfo info[CONSUMERS][Q_STAGES];
  uint64_t k_full[KV_STAGES], k_empty[KV_STAGES];
  uint64_t v_full[KV_STAGES], v_empty[KV_STAGES];
  uint64_t v_landed;  // values that must be cleared before the consumers may see them
  uint64_t q_full[CONSUMERS][Q_STAGES], q_empty[CONSUMERS][Q_STAGES];
};
using Many = Shared<3, 2, 2>;
// Where few queries share a block, its keys and values are what takes time.
using Few = Shared<2, 3, 1>;
static_assert(sizeof(Many) <= 227 * 1024 && sizeof(Few) <= 227 * 1024,
              "a multiprocessor's shared memory");

struct Sizes {
  int32_t group;          // query heads of a KV head
  int32_t tile_queries;   // ROWS / group
  int32_t num_row_units;  // eights of query rows of a token
};

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
enum Field { kPage, kHead, kFirstQuery, kNumQueries, kFirstTile, kVisible, kLimit };
static_assert(offsetof(KvItem, limit) == kLimit * sizeof(int32_t), "fields in their order");
__device__ int32_t field(int32_t record, Field which) {
  return __shfl_sync(~0u, record, which);
}

// One warp: brings keys and values of the items, the queries of their tiles, or both. What it reads
// ahead lies in its lanes: 32 queries, the 32 behind them, and the records of the next two items.
template <class S, bool kKeys, bool kQueries>
__device__ void produce(SparsePrefillParams const& p, SparsePrefillRound const& r,
                        CUtensorMap const& q_map, CUtensorMap const& kv_map, Sizes const& sizes,
                        S& shared) {
  int const lane = threadIdx.x % 32;
  TileShare const share = tile_share(p, r);
  if (share.begin >= share.end) return;
  int const batch_tiles = 32 / sizes.tile_queries;
  // A record behind the last one may be anything: it is not used.
  auto const load_record = [&](int32_t index) {
    return lane < 8 ? reinterpret_cast<int32_t const*>(r.blocks.items + index)[lane] : 0;
  };
  auto const load_queries = [&](int32_t first, int32_t count, int32_t nth_tile) {
    int32_t const i = nth_tile * sizes.tile_queries + lane;
    return i < count ? r.blocks.queries[first + i] : -1;
  };
  sm90::Ring<S::KV_STAGES> kv;
  uint32_t landed_parity = 0;
  int32_t index = find_item(p, r, share.begin), ordinal = 0;
  int32_t tile = share.begin;
  int32_t record = load_record(index), next_record = load_record(index + 1);
  int32_t queries = load_queries(field(record, kFirstQuery), field(record, kNumQueries),
                                 tile - field(record, kFirstTile));
  int32_t tokens = 0, next_queries = -1;
  int used = 0;  // tiles of `queries`
  while (tile < share.end) {
    int32_t const head = field(record, kHead), page = field(record, kPage);
    int32_t const first_tile = field(record, kFirstTile), count = field(record, kNumQueries);
    int32_t const visible = field(record, kVisible), limit = field(record, kLimit);
    int32_t const end =
        min(share.end, first_tile + (count + sizes.tile_queries - 1) / sizes.tile_queries);
    bool const ends_share = end == share.end;
    int32_t const later_record = ends_share ? 0 : load_record(index + 2);
    int const idle_warps = max(0, S::CONSUMERS - (end - tile)) * WARPS;  // never see the item
    int const s = kv.stage;
    uint32_t const k_full = ptx::shared_address(&shared.k_full[s]);
    uint32_t const v_full = ptx::shared_address(&shared.v_full[s]);
    uint32_t const k_empty = ptx::shared_address(&shared.k_empty[s]);
    uint32_t const v_empty = ptx::shared_address(&shared.v_empty[s]);
    uint32_t const v_landed = ptx::shared_address(&shared.v_landed);
    bool const partial = visible < KEYS;
    ptx::barrier_wait(k_empty, kv.parity ^ 1);
    // So that a consumer that has a tile of this item cannot take the values before for its own:
    // it looks at the keys first.
    if (kKeys) ptx::barrier_wait(v_full, kv.parity ^ 1);
    if (kKeys && lane < idle_warps) ptx::barrier_arrive(k_empty);
    auto const load_block = [&](uint8_t* to, uint32_t barrier, int part) {  // keys, values
      ptx::barrier_expect(barrier, KV_BYTES);
      for (int half = 0; half < 2; ++half) {
        sm90::load_tile(ptx::shared_address(to) + half * HALF_KV, &kv_map, barrier, half * 64, head,
                        0, 2 * page + part);
      }
    };
    if (kKeys && lane == 0) load_block(shared.k[s], k_full, 0);
    auto const load_values = [&] {
      ptx::barrier_wait(v_empty, kv.parity ^ 1);
      if (lane < idle_warps) ptx::barrier_arrive(v_empty);
      if (lane == 0) load_block(shared.v[s], partial ? v_landed : v_full, 1);
      if (partial) {
        ptx::barrier_wait(v_landed, landed_parity);
        landed_parity ^= 1;
        clear_values(shared.v[s], visible);
        if (lane == 0) ptx::barrier_arrive(v_full);
      }
    };

    if (!kQueries) {
      load_values();
      tile = end;
    }
    for (int32_t const first = tile; tile < end; ++tile) {
      if (used == 0) {
        tokens = r.first_token + queries / p.top_k;
        int32_t const following = tile + batch_tiles;
        if (following < end) {
          next_queries = load_queries(field(record, kFirstQuery), count, following - first_tile);
        } else if (!ends_share) {
          next_queries =
              load_queries(field(next_record, kFirstQuery), field(next_record, kNumQueries), 0);
        }
      }
      int const from = (used * sizes.tile_queries + lane) % 32;
      int32_t const some_query = __shfl_sync(~0u, queries, from);
      int32_t const token = __shfl_sync(~0u, tokens, from);
      int32_t const query = lane < sizes.tile_queries ? some_query : -1;
      if (++used == batch_tiles || tile + 1 == end) {
        queries = next_queries;
        used = 0;
      }
      int const c = (tile - share.begin) % S::CONSUMERS;
      int const turn = (tile - share.begin) / S::CONSUMERS;
      int const stage = turn % S::Q_STAGES;
      uint32_t const q_full = ptx::shared_address(&shared.q_full[c][stage]);
      ptx::barrier_wait(ptx::shared_address(&shared.q_empty[c][stage]), ~(turn / S::Q_STAGES) & 1);
      TileInfo& info = shared.info[c][stage];
      if (lane < MAX_QUERIES) {
        info.query[lane] = query;
        info.limit[lane] = query < 0 ? KEYS : min(KEYS, limit + token);
      }
      if (lane == 0) {
        info.item = ordinal;
        info.last = tile + S::CONSUMERS >= end;
        info.first_pair = first_pair_of_head(p, r, head);
      }
      int const present = __popc(__ballot_sync(~0u, query >= 0));
      __syncwarp();  // the tile's description is written
      if (lane == 0) ptx::barrier_expect(q_full, present * sizes.num_row_units * EIGHT_ROWS);
      __syncwarp();
      if (query >= 0) {
        int32_t const unit = token * (p.num_heads / 8) + head * sizes.num_row_units;
        sm90::load_tile(
            ptx::shared_address(shared.q[c][stage]) + lane * sizes.num_row_units * EIGHT_ROWS,
            &q_map, q_full, 0, 0, 0, unit);
      }
      // Behind the queries, for which consumers wait first.
      if (kKeys && tile == first) load_values();
    }
    kv.next();
    record = next_record;
    next_record = later_record;
    ++index;
    ++ordinal;
  }
}

// What the softmax leaves for the end of a tile: the lane's two rows.
struct RowSums {
  float maximum[2], sum[2];
};

// Scores become weights. `limit`: keys that the lane's rows see.
__device__ void weigh(float (&s)[64], RowSums& rows, float scale_log2, int const (&limit)[2]) {
  if (__any_sync(~0u, min(limit[0], limit[1]) < KEYS)) {
    int const lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= limit[i / 2 % 2]) s[i] = -INFINITY;
    }
  }
  // Several chains of maxima and sums, since one would wait for itself.
  float largest[2][4], sum[2][2] = {};
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    float& x = largest[i / 2 % 2][i / 4 % 4];
    x = i % 2 == 0 && i / 4 < 4 ? s[i] : fmaxf(x, s[i]);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    rows.maximum[h] =
        row_max(fmaxf(fmaxf(largest[h][0], largest[h][1]), fmaxf(largest[h][2], largest[h][3]))) *
        scale_log2;
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    s[i] = exp2_of(fmaf(s[i], scale_log2, -rows.maximum[i / 2 % 2]));
    sum[i / 2 % 2][i % 2] += s[i];
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) rows.sum[h] = sum[h][0] + sum[h][1];
}

__device__ void pack(uint32_t (&weights)[32], float const (&s)[64]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) weights[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
}

// Descriptors hold addresses in units of 16 bytes, so bytes are added as that.
__device__ void multiply_keys(uint32_t q, uint32_t k, float (&s)[64]) {
  uint64_t const a = sm90::row_descriptor(q, EIGHT_ROWS), b = sm90::row_descriptor(k);
#pragma unroll
  for (int step = 0; step < kHeadSize / 16; ++step) {
    uint64_t const rows = a + (step / 4 * (EIGHT_ROWS / 2) + step % 4 * 32) / 16;
    uint64_t const keys = b + (step / 4 * HALF_KV + step % 4 * 32) / 16;
    step > 0 ? sm90::multiply_rows(s, rows, keys, 1) : sm90::begin_rows(s, rows, keys);
  }
}

__device__ void multiply_values(uint32_t v, float (&out)[64], uint32_t const (&weights)[32]) {
  uint64_t const b = sm90::column_descriptor(v, HALF_KV);
#pragma unroll
  for (int step = 0; step < KEYS / 16; ++step) {
    uint64_t const values = b + step * 16 * 128 / 16;
    step > 0 ? sm90::multiply_columns(out, weights + 4 * step, values)
             : sm90::begin_columns(out, weights, values);
  }
}

// The same value in every lane, in a register of the warp.
__device__ int uniform(int x) {
  return __shfl_sync(~0u, x, 0);
}

// A tile of the consumer, as one of its lanes sees it.
struct Tile {
  int32_t query[2];  // of the lane's two rows
  int limit[2];
  int32_t item;
  bool last;
  int64_t first_pair;
};

__device__ void store(SparsePrefillRound const& r, Sizes const& sizes, Tile const& tile,
                      RowSums const& rows, float const (&out)[64]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float const sum = row_sum(rows.sum[h]);
    if (tile.query[h] < 0) continue;
    // Of 16 heads, the second eight are the second rows of the same query.
    int const unit = sizes.num_row_units == 2 ? h : 0;
    store_partial(r, sizes.group, tile.first_pair + tile.query[h], unit, h, out, reciprocal(sum),
                  rows.maximum[h] + log2_of(sum));
  }
}

// A warpgroup, one tile after the other: meanwhile the others keep the tensor cores busy.
template <class S>
__device__ void consume(SparsePrefillParams const& p, SparsePrefillRound const& r,
                        Sizes const& sizes, S& shared) {
  constexpr int CONSUMERS = S::CONSUMERS, KV_STAGES = S::KV_STAGES;
  int const self = uniform(threadIdx.x / WARPGROUP - 1);
  int const warp = threadIdx.x % WARPGROUP / 32, lane = threadIdx.x % 32;
  TileShare const share = tile_share(p, r);
  int const count = (share.end - share.begin + CONSUMERS - 1 - self) / CONSUMERS;
  if (count <= 0) return;
  float const scale_log2 = p.softmax_scale * 1.44269504088896341f;
  sm90::Ring<S::Q_STAGES> queries;
  auto const wait_tile = [&] {
    ptx::barrier_wait(ptx::shared_address(&shared.q_full[self][queries.stage]), queries.parity);
    TileInfo const& info = shared.info[self][queries.stage];
    Tile tile;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int const q = sizes.num_row_units == 2 ? warp : 2 * warp + h;
      tile.query[h] = info.query[q];
      tile.limit[h] = info.limit[q];
    }
    tile.item = uniform(info.item);
    tile.last = uniform(info.last) != 0;
    tile.first_pair = info.first_pair;
    ptx::barrier_wait(ptx::shared_address(&shared.k_full[tile.item % KV_STAGES]),
                      tile.item / KV_STAGES % 2);
    return tile;
  };
  auto const wait_values = [&](Tile const& tile) {
    ptx::barrier_wait(ptx::shared_address(&shared.v_full[tile.item % KV_STAGES]),
                      tile.item / KV_STAGES % 2);
  };
  auto const arrive = [&](uint64_t& barrier) {
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(ptx::shared_address(&barrier));
  };
  auto const score = [&](Tile const& tile, float (&s)[64]) {
    multiply_keys(ptx::shared_address(shared.q[self][queries.stage]),
                  ptx::shared_address(shared.k[tile.item % KV_STAGES]), s);
    sm90::commit();
  };
  auto const free_scored = [&](Tile const& tile) {
    arrive(shared.q_empty[self][queries.stage]);
    queries.next();
    if (tile.last) arrive(shared.k_empty[tile.item % KV_STAGES]);
  };
  auto const sum = [&](Tile const& tile, float (&out)[64], uint32_t const(&weights)[32]) {
    multiply_values(ptx::shared_address(shared.v[tile.item % KV_STAGES]), out, weights);
    sm90::commit();
  };

  for (int i = 0; i < count; ++i) {
    Tile const tile = wait_tile();
    // Not outside of the loop, where a tile's registers would hold the last one's values.
    float s[64], out[64];
    uint32_t weights[32];
    RowSums rows;
    sm90::fence();
    score(tile, s);
    sm90::wait<0>();
    sm90::pin(s);
    free_scored(tile);
    weigh(s, rows, scale_log2, tile.limit);
    pack(weights, s);
    wait_values(tile);
    sm90::fence();
    sum(tile, out, weights);
    sm90::wait<0>();
    sm90::pin(out);
    if (tile.last) arrive(shared.v_empty[tile.item % KV_STAGES]);
    store(r, sizes, tile, rows, out);
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
  return run_sparse_prefill(p, rounds, workspace, stream, attend, launch_sm90_paged_prefill);
}

}  // namespace m3::kernels
