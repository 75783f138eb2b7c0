#include "kernels/mma_sync.cuh"
#include "kernels/paged_prefill_tiles.cuh"

namespace m3::kernels {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = kPrefillRows;
constexpr int M = ROWS / WARPS / 16;   // row fragments of a warp
constexpr int KEYS = 64;               // of a tile
constexpr int CHUNKS = kHeadSize / 8;  // 16-byte chunks of a row
constexpr int STAGES = 2;
static_assert(kBlockSize % KEYS == 0, "a tile never spans two pages");

struct __align__(128) PrefillShared {
  uint8_t q[ROWS * kHeadSize * 2];
  uint8_t k[STAGES][KEYS * kHeadSize * 2];
  uint8_t v[STAGES][KEYS * kHeadSize * 2];
  uint32_t chosen[ROWS];  // of a token, when rows select
};

__device__ void load_queries(PagedPrefillParams const& p, PrefillShared& shared,
                             PrefillTile const& tile, int head, int group) {
  uint32_t const to = shared_address(shared.q);
#pragma unroll 4
  for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
    int const row = i / CHUNKS, chunk = i % CHUNKS;
    bool const valid = row < tile.num_tokens * group;
    int64_t const token = tile.first_token + (valid ? row / group : 0);
    int const query_head = head * group + (valid ? row % group : 0);
    copy_async(
        to + swizzled<CHUNKS>(row, chunk),
        static_cast<Bf16 const*>(p.q) + (token * p.num_heads + query_head) * kHeadSize + chunk * 8,
        valid);
  }
}

// Keys and values of a tile; zeros from `visible` on, which may be unused slots that hold NaN.
__device__ void load_keys(PagedPrefillParams const& p, PrefillShared& shared, int stage,
                          int32_t page, int first, int head, int32_t visible) {
  int64_t const token_stride = int64_t{p.num_kv_heads} * kHeadSize;
  int const row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
  auto const* const keys = static_cast<Bf16 const*>(p.kv_cache) +
                           (int64_t{page} * 2 * kBlockSize + first + row) * token_stride +
                           head * kHeadSize + chunk * 8;
  uint32_t const at = swizzled<CHUNKS>(row, chunk);
  uint32_t const k = shared_address(shared.k[stage]) + at;
  uint32_t const v = shared_address(shared.v[stage]) + at;
  constexpr int STEP = THREADS / CHUNKS;
#pragma unroll
  for (int i = 0; i < KEYS / STEP; ++i) {
    copy_async(k + i * STEP * CHUNKS * 16, keys + i * STEP * token_stride,
               row + i * STEP < visible);
  }
  auto const* const values = keys + kBlockSize * token_stride;
#pragma unroll
  for (int i = 0; i < KEYS / STEP; ++i) {
    copy_async(v + i * STEP * CHUNKS * 16, values + i * STEP * token_stride,
               row + i * STEP < visible);
  }
}

// A warp's 32 rows.
struct State {
  float maximum[M][2];
  float sum[M][2];
  float out[M][kHeadSize / 8][4];
};

using Scores = float[M][KEYS / 8][4];

__device__ void score_tile(PrefillShared const& shared, int stage, Scores& s) {
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t const q = shared_address(shared.q), k = shared_address(shared.k[stage]);
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
      load_matrices(a[m],
                    q + swizzled<CHUNKS>((warp * M + m) * 16 + lane % 16, 2 * step + lane / 16));
    }
#pragma unroll
    for (int n = 0; n < KEYS / 16; ++n) {
      uint32_t b[4];
      load_matrices(
          b, k + swizzled<CHUNKS>(n * 16 + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        multiply_add(s[m][2 * n], a[m], b[0], b[1]);
        multiply_add(s[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Scores become weights; `limit`: keys of this tile that the lane's rows see.
__device__ void weigh_tile(State& state, Scores& s, float scale_log2, bool masked,
                           int const (&limit)[M][2]) {
  int const lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = -INFINITY;
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& x = s[m][n][2 * h + j];
          if (masked && n * 8 + lane % 4 * 2 + j >= limit[m][h]) x = -INFINITY;
          largest = fmaxf(largest, x);
        }
      }
      float const maximum = fmaxf(state.maximum[m][h], row_max(largest) * scale_log2);
      // With every score at -inf so far, -inf - -inf would be NaN.
      float const base = maximum == -INFINITY ? 0.f : maximum;
      float const decay = exp2f(state.maximum[m][h] - base);
      state.maximum[m][h] = maximum;
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& x = s[m][n][2 * h + j];
          x = exp2f(fmaf(x, scale_log2, -base));
          sum += x;
        }
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

__device__ void sum_tile(PrefillShared const& shared, int stage, State& state, Scores const& s) {
  int const lane = threadIdx.x % 32;
  uint32_t const v = shared_address(shared.v[stage]);
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
      load_matrices_transposed(b, v + swizzled<CHUNKS>(step * 16 + lane % 16, 2 * n + lane / 16));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        multiply_add(state.out[m][2 * n], a[m], b[0], b[1]);
        multiply_add(state.out[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Grid: (KV heads, slots), the tiles with most keys first.
template <bool kSelects>
__global__ void __launch_bounds__(THREADS, 2)
    prefill_kernel(__grid_constant__ PagedPrefillParams const p, int tile_tokens) {
  extern __shared__ __align__(128) uint8_t memory[];
  auto& shared = *reinterpret_cast<PrefillShared*>(memory);
  clear_context_padding(p, threadIdx.x, THREADS);
  int const head = blockIdx.x;
  PrefillTile const tile = prefill_tile(p, tile_tokens, blockIdx.y);
  if (tile.num_tokens == 0) return;
  if (kSelects && !is_joined(p.joined, tile, blockIdx.y, head, p.num_kv_heads)) return;
  int const group = p.num_heads / p.num_kv_heads;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  int32_t const length = tile.length();
  int const count = ((kSelects ? min(length, kMaxJoined * kBlockSize) : length) + KEYS - 1) / KEYS;
  auto const page_at = [&](int t) {
    return page_of(p.tokens, tile.request, t * KEYS / kBlockSize);
  };
  auto const load = [&](int t, int32_t page) {
    if (t < count && page >= 0) {
      load_keys(p, shared, t % STAGES, page, t * KEYS % kBlockSize, head, length - t * KEYS);
    }
    commit_copies();
  };
  load_queries(p, shared, tile, head, group);
  int32_t page = count > 0 ? page_at(0) : -1, next_page = count > 1 ? page_at(1) : -1;
  load(0, page);
  for (int i = warp; kSelects && i < tile.num_tokens; i += WARPS) {
    int32_t const block = lane < p.top_k ? chosen_block(p, tile, head, i, lane) : -1;
    uint32_t const chosen =
        __reduce_or_sync(~0u, block >= 0 && block < kMaxJoined ? 1u << block : 0);
    if (lane == 0) shared.chosen[i] = chosen;
  }

  int position[M][2];
  State state{};
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      position[m][h] = tile.first_position + ((warp * M + m) * 16 + 8 * h + lane / 4) / group;
      state.maximum[m][h] = -INFINITY;
    }
  }
  auto const sees = [&](int m, int h, int block) {
    int const token = ((warp * M + m) * 16 + 8 * h + lane / 4) / group;
    return !kSelects || (token < tile.num_tokens && (shared.chosen[token] >> block & 1) != 0);
  };
  float const scale_log2 = p.softmax_scale * 1.44269504088896341f;
  for (int t = 0; t < count; ++t) {
    wait_copies<0>();
    __syncthreads();  // tile t is here, and every warp is done with the other stage
    load(t + 1, next_page);
    int32_t const following = t + 2 < count ? page_at(t + 2) : -1;
    if (page >= 0) {
      Scores s;
      score_tile(shared, t % STAGES, s);
      int limit[M][2];
#pragma unroll
      for (int m = 0; m < M; ++m) {
        for (int h = 0; h < 2; ++h) {
          limit[m][h] = sees(m, h, t * KEYS / kBlockSize) ? position[m][h] + 1 - t * KEYS : 0;
        }
      }
      weigh_tile(state, s, scale_log2, kSelects || tile.first_position + 1 - t * KEYS < KEYS,
                 limit);
      sum_tile(shared, t % STAGES, state, s);
    }
    page = next_page;
    next_page = following;
  }
  wait_copies<0>();

#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float const sum = row_sum(state.sum[m][h]);
      int const row = (warp * M + m) * 16 + 8 * h + lane / 4;
      if (row / group >= tile.num_tokens) continue;
      float const factor = sum == 0.f ? 0.f : 1.f / sum;
      int64_t const to =
          int64_t{tile.first_token + row / group} * p.num_heads + head * group + row % group;
      auto* const out = static_cast<Bf16*>(p.out) + to * kHeadSize + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kHeadSize / 8; ++n) {
        *reinterpret_cast<uint32_t*>(out + 8 * n) =
            pack_bf16(state.out[m][n][2 * h] * factor, state.out[m][n][2 * h + 1] * factor);
      }
    }
  }
}

}  // namespace

cudaError_t launch_smxx_paged_prefill(PagedPrefillParams const& p, cudaStream_t stream) {
  if (p.num_tokens == 0) return cudaSuccess;
  if (p.num_heads % p.num_kv_heads != 0 || p.num_heads > kMaxGroup * p.num_kv_heads) {
    return cudaErrorInvalidValue;
  }
  int const tile_tokens = ROWS / (p.num_heads / p.num_kv_heads);
  auto* const kernel = p.block_ids == nullptr ? prefill_kernel<false> : prefill_kernel<true>;
  cudaError_t const status = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(PrefillShared));
  if (status != cudaSuccess) return status;
  dim3 const grid(p.num_kv_heads, prefill_slots(p, tile_tokens));
  kernel<<<grid, THREADS, sizeof(PrefillShared), stream>>>(p, tile_tokens);
  return cudaGetLastError();
}

}  // namespace m3::kernels
