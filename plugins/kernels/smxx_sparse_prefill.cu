#include <algorithm>
#include <cstdint>

#include "kernels/numeric.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/sparse_prefill_items.cuh"
#include "kernels/this_device.h"

// Thread blocks share the tiles of a round equally, in the order of the KV blocks, and keep a KV
// block in shared memory while their warps go through its tiles, half a tile each.
namespace m3::kernels {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int M = 2;          // row fragments of a warp
constexpr int ROWS = 16 * M;  // of a warp
constexpr int HALVES = kSparseTileRows / ROWS;
constexpr int KEYS = 64;               // scored at once
constexpr int CHUNKS = kHeadSize / 8;  // of 16 bytes, of a bf16 row
constexpr int ROW_UNITS = ROWS / kUnitHeads;
static_assert(HALVES == 2, "a warp takes half a tile");

struct __align__(128) Shared {
  uint8_t k[kBlockSize * kHeadSize * 2];
  uint8_t v[kBlockSize * kHeadSize * 2];
  uint8_t q[WARPS][ROWS * kHeadSize * 2];
};

__device__ void copy_row_chunk(uint32_t to, uint8_t*, Bf16 const* from, bool valid) {
  copy_async(to, from, valid);
}
// e4m3 becomes bf16, which holds each of its values; the scale comes later.
__device__ void copy_row_chunk(uint32_t, uint8_t* to, __nv_fp8_e4m3 const* from, bool valid) {
  uint2 const bits = valid ? *reinterpret_cast<uint2 const*>(from) : make_uint2(0, 0);
  auto const* const values = reinterpret_cast<__nv_fp8_e4m3 const*>(&bits);
  uint32_t x[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = pack_bf16(to_float(values[2 * i]), to_float(values[2 * i + 1]));
  }
  *reinterpret_cast<uint4*>(to) = make_uint4(x[0], x[1], x[2], x[3]);
}

// Keys and values of an item; zeros from `visible` on, which may be unused slots that hold NaN.
template <class C>
__device__ void load_block(SparsePrefillParams const& p, Shared& shared, KvItem const& item) {
  int64_t const token_stride = int64_t{p.num_kv_heads} * kHeadSize;
  auto const* const keys = static_cast<C const*>(p.kv_cache) +
                           int64_t{item.page} * 2 * kBlockSize * token_stride +
                           item.head * kHeadSize;
  auto const* const values = keys + kBlockSize * token_stride;
  uint32_t const k = shared_address(shared.k), v = shared_address(shared.v);
#pragma unroll 4
  for (int i = threadIdx.x; i < kBlockSize * CHUNKS; i += THREADS) {
    int const row = i / CHUNKS, chunk = i % CHUNKS;
    bool const valid = row < item.visible;
    int64_t const from = valid ? row * token_stride + chunk * 8 : 0;
    uint32_t const at = swizzled<CHUNKS>(row, chunk);
    copy_row_chunk(k + at, shared.k + at, keys + from, valid);
    copy_row_chunk(v + at, shared.v + at, values + from, valid);
  }
}

// Half a tile, as a warp sees it: lane i < ROW_UNITS has query and limit of eight rows.
struct HalfTile {
  int32_t query = -1;          // place among the round's pairs; -1: none
  int32_t limit = kBlockSize;  // keys of the block that it sees
};

__device__ HalfTile half_tile(SparsePrefillParams const& p, SparsePrefillRound const& r,
                              KvItem const& item, int units, int32_t index) {
  int const lane = threadIdx.x % 32;
  HalfTile half;
  int32_t const i = (index * ROW_UNITS + lane) / units;
  if (lane < ROW_UNITS && i < item.num_queries) {
    half.query = r.blocks.queries[item.first_query + i];
    half.limit = min(kBlockSize, item.limit + r.first_token + half.query / p.top_k);
  }
  return half;
}

__device__ void load_queries(SparsePrefillParams const& p, SparsePrefillRound const& r,
                             Shared& shared, KvItem const& item, int units, HalfTile const& half) {
  int const lane = threadIdx.x % 32;
  uint32_t const to = shared_address(shared.q[threadIdx.x / 32]);
#pragma unroll
  for (int unit = 0; unit < ROW_UNITS; ++unit) {
    int32_t const query = __shfl_sync(~0u, half.query, unit);
    int64_t const token = r.first_token + (query < 0 ? 0 : query / p.top_k);
    auto const* const rows =
        static_cast<Bf16 const*>(p.q) +
        (token * p.num_heads + (item.head * units + unit % units) * kUnitHeads) * kHeadSize;
#pragma unroll
    for (int i = 0; i < kUnitHeads * CHUNKS / 32; ++i) {
      int const row = i * 2 + lane / CHUNKS, chunk = lane % CHUNKS;
      copy_async(to + swizzled<CHUNKS>(unit * kUnitHeads + row, chunk),
                 rows + row * kHeadSize + chunk * 8, query >= 0);
    }
  }
}

// A warp's rows.
struct State {
  float maximum[M][2], sum[M][2];
  float out[M][kHeadSize / 8][4];
};
using Scores = float[M][KEYS / 8][4];

__device__ void score(Shared const& shared, int first_key, Scores& s) {
  int const lane = threadIdx.x % 32;
  uint32_t const q = shared_address(shared.q[threadIdx.x / 32]), k = shared_address(shared.k);
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.f;
  }
#pragma unroll
  for (int step = 0; step < kHeadSize / 16; ++step) {
    uint32_t a[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) {
      load_matrices(a[m], q + swizzled<CHUNKS>(m * 16 + lane % 16, 2 * step + lane / 16));
    }
#pragma unroll
    for (int n = 0; n < KEYS / 16; ++n) {
      uint32_t b[4];
      load_matrices(b, k + swizzled<CHUNKS>(first_key + n * 16 + lane % 8 + lane / 16 * 8,
                                            2 * step + lane / 8 % 2));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        multiply_add(s[m][2 * n], a[m], b[0], b[1]);
        multiply_add(s[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Scores become weights. `limit`: keys that the lane's rows see, from the first scored one.
__device__ void weigh(State& state, Scores& s, float scale_log2, bool masked,
                      int const (&limit)[M][2]) {
  int const lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = -INFINITY;
#pragma unroll
      for (int i = 0; i < KEYS / 4; ++i) {
        float& x = s[m][i / 2][2 * h + i % 2];
        if (masked && i / 2 * 8 + lane % 4 * 2 + i % 2 >= limit[m][h]) x = -INFINITY;
        largest = fmaxf(largest, x);
      }
      float const maximum = fmaxf(state.maximum[m][h], row_max(largest) * scale_log2);
      float const decay = exp2_of(state.maximum[m][h] - maximum);
      state.maximum[m][h] = maximum;
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < KEYS / 4; ++i) {
        float& x = s[m][i / 2][2 * h + i % 2];
        x = exp2_of(fmaf(x, scale_log2, -maximum));
        sum += x;
      }
      state.sum[m][h] = state.sum[m][h] * decay + sum;
#pragma unroll
      for (int n = 0; n < kHeadSize / 8; ++n) {
        state.out[m][n][2 * h] *= decay;
        state.out[m][n][2 * h + 1] *= decay;
      }
    }
  }
}

__device__ void add_values(Shared const& shared, int first_key, State& state, Scores const& s) {
  int const lane = threadIdx.x % 32;
  uint32_t const v = shared_address(shared.v);
#pragma unroll
  for (int step = 0; step < KEYS / 16; ++step) {
    uint32_t a[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) {
      a[m][0] = pack_bf16(s[m][2 * step][0], s[m][2 * step][1]);
      a[m][1] = pack_bf16(s[m][2 * step][2], s[m][2 * step][3]);
      a[m][2] = pack_bf16(s[m][2 * step + 1][0], s[m][2 * step + 1][1]);
      a[m][3] = pack_bf16(s[m][2 * step + 1][2], s[m][2 * step + 1][3]);
    }
#pragma unroll
    for (int n = 0; n < kHeadSize / 16; ++n) {
      uint32_t b[4];
      load_matrices_transposed(
          b, v + swizzled<CHUNKS>(first_key + step * 16 + lane % 16, 2 * n + lane / 16));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        multiply_add(state.out[m][2 * n], a[m], b[0], b[1]);
        multiply_add(state.out[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

__device__ void store(SparsePrefillParams const& p, SparsePrefillRound const& r, KvItem const& item,
                      int units, HalfTile const& half, State const& state, float value_scale) {
  int64_t const first_pair = first_pair_of_head(p, r, item.head);
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float const sum = row_sum(state.sum[m][h]);
      int32_t const query = __shfl_sync(~0u, half.query, 2 * m + h);
      if (query < 0) continue;
      store_partial(r, units * kUnitHeads, first_pair + query, (2 * m + h) % units, h,
                    state.out[m][0], value_scale * reciprocal(sum),
                    state.maximum[m][h] + log2_of(sum));
    }
  }
}

template <class C>
__global__ void __launch_bounds__(THREADS, 2)
    sparse_prefill_kernel(__grid_constant__ SparsePrefillParams const p,
                          __grid_constant__ SparsePrefillRound const r) {
  extern __shared__ __align__(128) uint8_t memory[];
  auto& shared = *reinterpret_cast<Shared*>(memory);
  wait_for_previous_kernel();
  WorkShare const share = share_of(work_of_round(r), blockIdx.x, blockIdx.x + 1, gridDim.x);
  if (share.begin >= share.end) return;
  int const warp = threadIdx.x / 32;
  int const units = p.num_heads / p.num_kv_heads / kUnitHeads;
  int const tile_queries = kSparseTileRows / kUnitHeads / units;
  float const cache_scale = p.kv_scale == nullptr ? 1.f : *p.kv_scale;
  float const scale_log2 = p.softmax_scale * cache_scale * 1.44269504088896341f;

  int32_t const items_end = last_item(r);
  for (int32_t index = find_item(r, share.begin); index < items_end; ++index) {
    KvItem const item = r.blocks.items[index];
    if (item.first_work >= share.end) break;
    TileRange const tiles =
        tiles_of_share(share, item.first_work, item.num_queries, tile_queries, 1);
    if (tiles.begin >= tiles.end) continue;
    int32_t half_index = HALVES * tiles.begin + warp;
    int32_t const half_end = HALVES * tiles.end;
    HalfTile half;
    if (half_index < half_end) {
      half = half_tile(p, r, item, units, half_index);
      load_queries(p, r, shared, item, units, half);
    }
    __syncthreads();  // every warp is done with the block before this one
    load_block<C>(p, shared, item);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    for (; half_index < half_end; half_index += WARPS) {
      wait_copies<0>();
      __syncwarp();  // the queries are here
      int limit[M][2];
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) limit[m][h] = __shfl_sync(~0u, half.limit, 2 * m + h);
      }
      bool const masked = __any_sync(~0u, half.limit < kBlockSize);
      State state{};
#pragma unroll
      for (int m = 0; m < M; ++m) state.maximum[m][0] = state.maximum[m][1] = -INFINITY;
      HalfTile const done = half;
#pragma unroll 1
      for (int first_key = 0; first_key < kBlockSize; first_key += KEYS) {
        Scores s;
        score(shared, first_key, s);
        if (first_key + KEYS == kBlockSize) {
          __syncwarp();  // every lane has read the queries
          if (half_index + WARPS < half_end) {
            half = half_tile(p, r, item, units, half_index + WARPS);
            load_queries(p, r, shared, item, units, half);
          }
          commit_copies();
        }
        weigh(state, s, scale_log2, masked, limit);
        add_values(shared, first_key, state, s);
#pragma unroll
        for (int m = 0; m < M; ++m) limit[m][0] -= KEYS, limit[m][1] -= KEYS;
      }
      store(p, r, item, units, done, state, cache_scale);
    }
  }
}

template <class C>
cudaError_t attend(SparsePrefillParams const& p, SparsePrefillRound const& round,
                   cudaStream_t stream) {
  auto* const kernel = sparse_prefill_kernel<C>;
  cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (status != cudaSuccess) return status;
  int processors = 0, blocks = 0;
  status = count_processors(processors);
  if (status != cudaSuccess) return status;
  status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, THREADS, sizeof(Shared));
  if (status != cudaSuccess) return status;
  return launch_behind(kernel, std::max(1, blocks) * processors, THREADS, sizeof(Shared), stream, p,
                       round);
}

}  // namespace

cudaError_t launch_smxx_sparse_prefill(SparsePrefillParams const& p, SparsePrefillRounds rounds,
                                       void* workspace, cudaStream_t stream) {
  return p.kv_scale == nullptr ? run_sparse_prefill(p, rounds, workspace, stream, attend<Bf16>,
                                                    launch_smxx_paged_prefill, kMaxJoined, 1)
                               : run_sparse_prefill(p, rounds, workspace, stream,
                                                    attend<__nv_fp8_e4m3>, nullptr, 0, 1);
}

}  // namespace m3::kernels
