#pragma once

#include <cstdint>

#include "kernels/sm90_attention_mma.cuh"
#include "kernels/sparse_prefill_items.cuh"

// What sm90_sparse_prefill.cu's thread blocks have in shared memory, and what their consuming
// warpgroups do with it.
namespace m3::kernels::sparse_prefill {

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
  int32_t limit[MAX_QUERIES];  // keys of the first block on that it sees
  int32_t block;               // the first one, of those of the thread block; -1: no further tile
  int32_t flags;
  int64_t first_pair;  // of the item's head
};
// Of a tile: whether it is of two blocks; whether the consumer has no further tile of the first and
// of the second one.
constexpr int32_t kTwoBlocks = 1, kLastOfFirst = 2, kLastOfSecond = 4;

// What a producing warp brings, in shared memory, as registers are few.
struct Share {
  WorkShare work;
  int32_t items_end;  // of the round
};

// What the warp that brings keys tells the one that brings queries.
struct Mail {
  int32_t numbers[2];
  uint64_t full[2], empty[2];

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __device__ void init() {
    for (int s = 0; s < 2; ++s) {
      ptx::barrier_init(ptx::shared_address(&full[s]), 1);
      ptx::barrier_init(ptx::shared_address(&empty[s]), 1);
    }
  }
  __device__ void put(int32_t i, int32_t number) {
    ptx::barrier_wait(ptx::shared_address(&empty[i % 2]), ~(i / 2) & 1);
    if (threadIdx.x % 32 == 0) {
      numbers[i % 2] = number;
      ptx::barrier_arrive(ptx::shared_address(&full[i % 2]));
    }
    __syncwarp();
  }
  __device__ int32_t get(int32_t i) {
    ptx::barrier_wait(ptx::shared_address(&full[i % 2]), i / 2 & 1);
    int32_t const number = numbers[i % 2];
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(ptx::shared_address(&empty[i % 2]));
    return number;
  }
#endif
};

// kQueryStages: of each consumer, a warpgroup.
template <int kConsumers, int kKvStages, int kQueryStages>
struct __align__(1024) Shared {
  static constexpr int CONSUMERS = kConsumers;
  static constexpr int KV_STAGES = kKvStages;
  static constexpr int Q_STAGES = kQueryStages;
  static constexpr int THREADS = WARPGROUP * (1 + CONSUMERS);
  // A thread block begins with OWN_PARTS of its PARTS of the work, unless a part would be less work
  // than that of so many blocks' tiles.
  static constexpr int PARTS = 32, OWN_PARTS = 28;
  static constexpr int LEAST_PART = CONSUMERS == 3 ? 12 : 4;
  // Registers of a thread: three consumers leave 160 for each.
  static constexpr int PRODUCER_REGISTERS = CONSUMERS == 3 ? 32 : 56;
  static constexpr int CONSUMER_REGISTERS = CONSUMERS == 3 ? 160 : 224;
  uint8_t k[KV_STAGES][KV_BYTES];
  uint8_t v[KV_STAGES][KV_BYTES];
  uint8_t q[CONSUMERS][Q_STAGES][Q_BYTES];
  TileInfo info[CONSUMERS][Q_STAGES];
  uint64_t k_full[KV_STAGES], k_empty[KV_STAGES];
  uint64_t v_full[KV_STAGES], v_empty[KV_STAGES];
  uint64_t v_landed;  // values that must be cleared before the consumers may see them
  Mail parts;
  Share shares[2];  // of the warps that bring keys, queries
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

// What the softmax leaves for the end of a tile: the lane's two rows.
struct RowSums {
  float maximum[2], sum[2];
};

// Scores become weights. `limit`: keys that the lane's rows see. kRounded: weights are powers of
// two away from those of another maximum, which is no smaller than `least`.
template <bool kRounded>
__device__ void weigh(float (&s)[64], RowSums& rows, float scale_log2, int const (&limit)[2],
                      float const (&least)[2]) {
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
    if (kRounded) rows.maximum[h] = fmaxf(ceilf(rows.maximum[h]), least[h]);
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    s[i] = exp2_of(fmaf(s[i], scale_log2, -rows.maximum[i / 2 % 2]));
    sum[i / 2 % 2][i % 2] += s[i];
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) rows.sum[h] = sum[h][0] + sum[h][1];
}

__device__ inline void pack(uint32_t (&weights)[32], float const (&s)[64]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) weights[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
}

// Weights of two bf16 each, by the factor of their row, a power of two.
__device__ inline void rescale(uint32_t (&weights)[32], float const (&factor)[2]) {
  uint32_t const x[2] = {pack_bf16(factor[0], factor[0]), pack_bf16(factor[1], factor[1])};
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(weights[i]) : "r"(x[i % 2]));
  }
}

// Descriptors hold addresses in units of 16 bytes, so bytes are added as that.
__device__ inline void multiply_keys(uint32_t q, uint32_t k, float (&s)[64]) {
  uint64_t const a = sm90::row_descriptor(q, EIGHT_ROWS), b = sm90::row_descriptor(k);
#pragma unroll
  for (int step = 0; step < kHeadSize / 16; ++step) {
    uint64_t const rows = a + (step / 4 * (EIGHT_ROWS / 2) + step % 4 * 32) / 16;
    uint64_t const keys = b + (step / 4 * HALF_KV + step % 4 * 32) / 16;
    step > 0 ? sm90::multiply_rows(s, rows, keys, 1) : sm90::begin_rows(s, rows, keys);
  }
}

template <bool kBegin>
__device__ void multiply_values(uint32_t v, float (&out)[64], uint32_t const (&weights)[32]) {
  uint64_t const b = sm90::column_descriptor(v, HALF_KV);
#pragma unroll
  for (int step = 0; step < KEYS / 16; ++step) {
    uint64_t const values = b + step * 16 * 128 / 16;
    kBegin&& step == 0 ? sm90::begin_columns(out, weights, values)
                       : sm90::multiply_columns(out, weights + 4 * step, values);
  }
}

// The same value in every lane, in a register of the warp.
__device__ inline int uniform(int x) {
  return __shfl_sync(~0u, x, 0);
}

// A tile of the consumer, as one of its lanes sees it.
struct Tile {
  int32_t query[2];  // of the lane's two rows
  int limit[2];
  int32_t block;
  int32_t flags;
  int64_t first_pair;
};

__device__ inline void store(SparsePrefillRound const& r, Sizes const& sizes, Tile const& tile,
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

// What a warpgroup has of the shared memory.
template <class S>
struct Consumer {
  S& shared;
  int self;
  sm90::Ring<S::Q_STAGES> queries;

  __device__ void wait(uint64_t (&barriers)[S::KV_STAGES], int32_t block) {
    ptx::barrier_wait(ptx::shared_address(&barriers[block % S::KV_STAGES]),
                      block / S::KV_STAGES % 2);
  }
  __device__ void arrive(uint64_t& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(ptx::shared_address(&barrier));
  }
  __device__ void score(int32_t block, float (&s)[64]) {
    multiply_keys(ptx::shared_address(shared.q[self][queries.stage]),
                  ptx::shared_address(shared.k[block % S::KV_STAGES]), s);
    sm90::commit();
  }
  __device__ void free_queries() {
    arrive(shared.q_empty[self][queries.stage]);
    queries.next();
  }
  __device__ void free_keys(int32_t block, bool last) {
    if (last) arrive(shared.k_empty[block % S::KV_STAGES]);
  }
  __device__ void free_values(int32_t block, bool last) {
    if (last) arrive(shared.v_empty[block % S::KV_STAGES]);
  }
  __device__ uint32_t values(int32_t block) {
    return ptx::shared_address(shared.v[block % S::KV_STAGES]);
  }

  // Also reads the keys' barrier.
  __device__ bool wait_tile(Sizes const& sizes, Tile& tile) {
    int const warp = threadIdx.x % WARPGROUP / 32;
    ptx::barrier_wait(ptx::shared_address(&shared.q_full[self][queries.stage]), queries.parity);
    TileInfo const& info = shared.info[self][queries.stage];
    tile.block = uniform(info.block);
    if (tile.block < 0) return false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int const q = sizes.num_row_units == 2 ? warp : 2 * warp + h;
      tile.query[h] = info.query[q];
      tile.limit[h] = info.limit[q];
    }
    tile.flags = uniform(info.flags);
    tile.first_pair = info.first_pair;
    wait(shared.k_full, tile.block);
    return true;
  }

  __device__ void one_block(SparsePrefillRound const& r, Sizes const& sizes, Tile const& tile,
                            float scale_log2) {
    float s[64], out[64];
    uint32_t weights[32];
    RowSums rows;
    sm90::fence();
    score(tile.block, s);
    sm90::wait<0>();
    sm90::pin(s);
    free_queries();
    free_keys(tile.block, tile.flags & kLastOfFirst);
    weigh<false>(s, rows, scale_log2, tile.limit, {-INFINITY, -INFINITY});
    pack(weights, s);
    wait(shared.v_full, tile.block);
    sm90::fence();
    multiply_values<true>(values(tile.block), out, weights);
    sm90::commit();
    sm90::wait<0>();
    sm90::pin(out);
    free_values(tile.block, tile.flags & kLastOfFirst);
    store(r, sizes, tile, rows, out);
  }

  // The weights of both blocks wait for their values, so that scores and sum share registers.
  __device__ void two_blocks(SparsePrefillRound const& r, Sizes const& sizes, Tile const& tile,
                             float scale_log2) {
    float out[64];
    uint32_t first_weights[32], weights[32];
    RowSums first_rows, rows;
    float s[64];
    sm90::fence();
    score(tile.block, s);
    sm90::wait<0>();
    sm90::pin(s);
    free_keys(tile.block, tile.flags & kLastOfFirst);
    weigh<true>(s, first_rows, scale_log2, tile.limit, {-INFINITY, -INFINITY});
    pack(first_weights, s);
    wait(shared.k_full, tile.block + 1);
    sm90::fence();
    score(tile.block + 1, s);
    sm90::wait<0>();
    sm90::pin(s);
    free_queries();
    free_keys(tile.block + 1, tile.flags & kLastOfSecond);
    int const limit[2] = {tile.limit[0] - KEYS, tile.limit[1] - KEYS};
    weigh<true>(s, rows, scale_log2, limit, first_rows.maximum);
    pack(weights, s);
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      factor[h] = exp2_of(first_rows.maximum[h] - rows.maximum[h]);
      rows.sum[h] = fmaf(first_rows.sum[h], factor[h], rows.sum[h]);
    }
    rescale(first_weights, factor);
    wait(shared.v_full, tile.block);
    wait(shared.v_full, tile.block + 1);
    sm90::fence();
    multiply_values<true>(values(tile.block), out, first_weights);
    multiply_values<false>(values(tile.block + 1), out, weights);
    sm90::commit();
    sm90::wait<0>();
    sm90::pin(out);
    free_values(tile.block, tile.flags & kLastOfFirst);
    free_values(tile.block + 1, tile.flags & kLastOfSecond);
    store(r, sizes, tile, rows, out);
  }
};

// A warpgroup, one tile after the other: meanwhile the others keep the tensor cores busy.
template <class S>
__device__ void consume(SparsePrefillParams const& p, SparsePrefillRound const& r,
                        Sizes const& sizes, S& shared) {
  Consumer<S> consumer{shared, uniform(threadIdx.x / WARPGROUP - 1), {}};
  float const scale_log2 = p.softmax_scale * 1.44269504088896341f;
  Tile tile;
  while (consumer.wait_tile(sizes, tile)) {
    if (tile.flags & kTwoBlocks) {
      consumer.two_blocks(r, sizes, tile, scale_log2);
    } else {
      consumer.one_block(r, sizes, tile, scale_log2);
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

}  // namespace m3::kernels::sparse_prefill
