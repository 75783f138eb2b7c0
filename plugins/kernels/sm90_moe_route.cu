#include <algorithm>

#include "kernels/numeric.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/sm90_moe_math.cuh"
#include "kernels/sm90_moe_stages.h"
#include "kernels/sm90_ptx.cuh"

namespace m3::kernels {
namespace {

constexpr int WARP_EXPERTS = 16;  // M of one tensor core instruction
constexpr int LOGITS_WARPS = 8;
constexpr int SELECT_THREADS = 128;
constexpr int PERMUTE_THREADS = 1024;

// Partial logits of TILES * 8 tokens over one part of hidden; a warp takes 16 experts, and SHARERS
// warps a part of the columns each. Lane l reads elements 8 (l % 4) .. + 7 of each 32 for both
// operands: the order of K is free.
template <int TILES, int SHARERS>
__global__ void __launch_bounds__(256, 2)
    sm90_moe_logits(MoeParams p, int64_t split_depth, float* __restrict__ logits) {
  int const lane = threadIdx.x % 32;
  constexpr int GROUPS = LOGITS_WARPS / SHARERS;
  int const group = static_cast<int>(threadIdx.x) / 32 % GROUPS;
  int const sharer = static_cast<int>(threadIdx.x) / 32 / GROUPS;
  int const expert0 = (static_cast<int>(blockIdx.z) * GROUPS + group) * WARP_EXPERTS;
  int64_t const token0 = int64_t{blockIdx.x} * TILES * 8;
  let_next_kernel_start();
  int64_t const begin = blockIdx.y * split_depth;
  int64_t const end = min(begin + split_depth, p.hidden);
  int const column = lane % 4 * 8;
  uint32_t weight[2];  // offsets
  for (int i = 0; i < 2; ++i) {
    int const expert = min(expert0 + lane / 4 + 8 * i, p.experts - 1);
    weight[i] = static_cast<uint32_t>(expert * p.hidden + column);
  }
  uint32_t x[TILES];
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    int64_t const token = min(token0 + t * 8 + lane / 4, p.tokens - 1);
    x[t] = static_cast<uint32_t>(token * p.hidden + column);
  }
  auto const* all_x = static_cast<__nv_bfloat16 const*>(p.x);

  float sums[TILES][4] = {};
  for (int64_t k = begin + sharer * 64; k < end; k += SHARERS * 64) {
    float part[TILES][4] = {};  // short sums: the tensor cores truncate
#pragma unroll
    for (int step = 0; step < 64; step += 32) {
      uint32_t a[2][3][4];  // of the two K = 16 instructions, of the three parts
#pragma unroll
      for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float4 const w = __ldg(
              reinterpret_cast<float4 const*>(p.router_weight + k + step + weight[row]) + half);
          uint32_t low[3], high[3];
          split_bf16(w.x, w.y, low);
          split_bf16(w.z, w.w, high);
#pragma unroll
          for (int i = 0; i < 3; ++i) {
            a[half][i][row] = low[i];
            a[half][i][row + 2] = high[i];
          }
        }
      }
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        uint4 const b = __ldg(reinterpret_cast<uint4 const*>(all_x + k + step + x[t]));
#pragma unroll
        for (int i = 0; i < 3; ++i) {
          ptx::mma_16x8x16(part[t], a[0][i], b.x, b.y);
          ptx::mma_16x8x16(part[t], a[1][i], b.z, b.w);
        }
      }
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[t][i] += part[t][i];
    }
  }

  if constexpr (SHARERS > 1) {
    __shared__ float parts[SHARERS - 1][GROUPS][TILES * 4][32];
    if (sharer > 0) {
#pragma unroll
      for (int i = 0; i < TILES * 4; ++i) parts[sharer - 1][group][i][lane] = sums[i / 4][i % 4];
    }
    __syncthreads();  // parts
    if (sharer > 0) return;
#pragma unroll
    for (int i = 0; i < TILES * 4; ++i) {
#pragma unroll
      for (int j = 0; j < SHARERS - 1; ++j) sums[i / 4][i % 4] += parts[j][group][i][lane];
    }
  }
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int64_t const token = token0 + t * 8 + lane % 4 * 2 + i % 2;
      int const expert = expert0 + lane / 4 + i / 2 * 8;
      if (token < p.tokens && expert < p.experts) {
        logits[(blockIdx.y * p.tokens + token) * p.experts + expert] = sums[t][i];
      }
    }
  }
}

// A block adds the partial logits of `count` tokens in order; then one warp a token chooses the
// top_k.
__global__ void __launch_bounds__(SELECT_THREADS)
    sm90_moe_select(MoeParams p, Sm90MoeWorkspace ws, int splits, int count) {
  extern __shared__ float dynamic[];
  float* probabilities = dynamic;                                          // [count, experts]
  auto* ranks = reinterpret_cast<uint32_t*>(dynamic + count * p.experts);  // [count, experts]
  wait_for_previous_kernel();
  let_next_kernel_start();
  int64_t const first = int64_t{blockIdx.x} * count;
  int64_t const size = p.tokens * p.experts;  // of one part
  int64_t const base = first * p.experts;
  auto const here = static_cast<int>(min(int64_t{count} * p.experts, size - base));
  for (int i = threadIdx.x; i < here; i += SELECT_THREADS) {
    float const bias = p.router_bias[i % p.experts];
    float sum = 0.0f;
#pragma unroll 8
    for (int s = 0; s < splits; ++s) sum += __ldcg(ws.logits + s * size + base + i);
    float const probability = 1.0f / (1.0f + expf(-sum));
    probabilities[i] = probability;
    ranks[i] = rank_of(probability + bias);
  }
  __syncthreads();  // probabilities and ranks
  int const warp = threadIdx.x / 32;
  int const lane = threadIdx.x % 32;
  int64_t const token = first + warp;
  if (warp >= count || token >= p.tokens) return;
  int32_t* ids = ws.expert_ids + token * p.top_k;
  float* weights = ws.expert_weights + token * p.top_k;
  if (p.first_token + token >= *p.real_tokens) {
    if (lane < p.top_k) {
      ids[lane] = -1;
      weights[lane] = 0.0f;
    }
    return;
  }
  probabilities += warp * p.experts;
  ranks += warp * p.experts;
  int my_id = 0;  // lane k keeps choice k
  float sum = 0.0f;
  for (int k = 0; k < p.top_k; ++k) {
    uint32_t best = 0;
    int id = kMaxExperts;
    for (int e = lane; e < p.experts; e += 32) {
      if (ranks[e] > best) {
        best = ranks[e];
        id = e;
      }
    }
    uint32_t const top = __reduce_max_sync(~0u, best);
    id = __reduce_min_sync(~0u, best == top ? id : kMaxExperts);  // ties: the lower expert
    if (id % 32 == lane) ranks[id] = 0;
    sum += probabilities[id];
    if (lane == k) my_id = id;
  }
  if (lane < p.top_k) {
    ids[lane] = my_id;
    weights[lane] = p.scale * (probabilities[my_id] / sum);
  }
}

// Sum over the block; every thread gets it, and in `before` the sum over lower threads.
__device__ int block_scan(int value, int* warp_sums, int& before) {
  int const warp = threadIdx.x / 32;
  int const lane = threadIdx.x % 32;
  int sum = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    int const other = __shfl_up_sync(~0u, sum, offset);
    if (lane >= offset) sum += other;
  }
  __syncthreads();  // warp_sums of an earlier scan are read
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();  // warp_sums are written
  int const warps = blockDim.x / 32;
  int const other = lane < warps ? warp_sums[lane] : 0;
  int const lower = __reduce_add_sync(~0u, lane < warp ? other : 0);
  before = lower + sum - value;
  return __reduce_add_sync(~0u, other);
}

// Brings the first columns of fc's first tiles into L2, a tile a block: while a step is routed
// nothing else is read. Which tiles come first supposes few tokens, but some, of each expert.
__device__ void prefetch_fc(MoeParams const& p, int tokens) {
  constexpr int HALF = SM90_MOE_WEIGHT_ROWS / 4;  // gate rows of a tile; as many up rows
  constexpr int BYTES = 2560;                     // of a row: 43 MB in all are most of L2
  auto const width = static_cast<int>(p.width);
  int const row_bytes = static_cast<int>(p.hidden) * 2;
  int const weight_tiles = (width + HALF - 1) / HALF;
  int const tile = static_cast<int>(blockIdx.x) - (tokens + 63) / 64;
  int const expert = max(tile, 0) / weight_tiles;
  int const first = max(tile, 0) % weight_tiles * HALF;
  if (expert >= p.experts) return;
  int const each = p.experts / p.parts;
  auto const* weights = static_cast<char const*>(tile < 0 ? p.shared_fc : p.fc[expert / each]);
  int64_t const row0 = tile < 0 ? 0 : int64_t{expert % each} * 2 * width;
  for (int i = threadIdx.x; i < 2 * min(HALF, width - first); i += static_cast<int>(blockDim.x)) {
    int64_t const row = row0 + i % 2 * width + first + i / 2;
    ptx::bulk_prefetch(weights + row * row_bytes, min(BYTES, row_bytes));
  }
}

// Block e lists the rows of expert e in ascending order. Its first place is the number of rows with
// a lower expert, which it counts itself: no atomics, so the order never varies. The last block
// lists the shared expert's.
__global__ void __launch_bounds__(PERMUTE_THREADS)
    sm90_moe_permute(MoeParams p, Sm90MoeWorkspace ws) {
  __shared__ int warp_sums[PERMUTE_THREADS / 32];
  int const expert = blockIdx.x;
  int const threads = static_cast<int>(blockDim.x);
  int const slots = p.top_k + 1;
  auto const real =
      static_cast<int>(max(int64_t{0}, min(p.tokens, int64_t{*p.real_tokens} - p.first_token)));
  int const pairs = real * p.top_k;
  if (pairs >= 2 * p.experts) prefetch_fc(p, real);
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (expert == p.experts) {
    for (int i = threadIdx.x; i < SM90_MOE_COUNTERS; i += threads) ws.arrivals[i] = 0;
    for (int i = threadIdx.x; i < real; i += threads) {
      ws.rows[pairs + i] = i * slots + p.top_k;
      ws.places[i * slots + p.top_k] = pairs + i;
    }
    if (threadIdx.x == 0) {
      ws.expert_begin[expert] = pairs;
      ws.expert_begin[expert + 1] = pairs + real;
    }
    return;
  }

  int lower = 0;
  for (int i = threadIdx.x; i < pairs; i += threads) lower += ws.expert_ids[i] < expert;
  int unused;
  int place = block_scan(lower, warp_sums, unused);
  if (threadIdx.x == 0) ws.expert_begin[expert] = place;

  // Each thread takes up to 32 neighbours, four at a time
  int const each = min(32, (pairs + 4 * threads - 1) / (4 * threads) * 4);
  for (int start = 0; start < pairs; start += each * threads) {
    int const first = start + static_cast<int>(threadIdx.x) * each;
    unsigned mine = 0;
#pragma unroll 8
    for (int i = 0; i < each; i += 4) {
      if (first + i >= pairs) break;
      int4 const ids = *reinterpret_cast<int4 const*>(ws.expert_ids + first + i);
      int const four[] = {ids.x, ids.y, ids.z, ids.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        bool const match = first + i + j < pairs && four[j] == expert;
        mine |= static_cast<unsigned>(match) << (i + j);
      }
    }
    int before;
    int const total = block_scan(__popc(mine), warp_sums, before);
    for (int at = place + before; mine != 0; mine &= mine - 1, ++at) {
      int const pair = first + __ffs(static_cast<int>(mine)) - 1;
      int const row = pair / p.top_k * slots + pair % p.top_k;
      ws.rows[at] = row;
      ws.places[row] = at;
    }
    place += total;
  }
}

template <int TILES, int SHARERS>
cudaError_t launch_logits(MoeParams const& p, Sm90MoeWorkspace const& ws, cudaStream_t stream) {
  int const splits = sm90_router_splits(p.tokens, p.hidden);
  constexpr int GROUPS = LOGITS_WARPS / SHARERS;
  dim3 const grid(static_cast<unsigned>(ceil_div(p.tokens, TILES * 8)), splits,
                  static_cast<unsigned>(ceil_div(p.experts, GROUPS * WARP_EXPERTS)));
  int64_t const depth = ceil_div(p.hidden / 64, splits) * 64;
  sm90_moe_logits<TILES, SHARERS><<<grid, LOGITS_WARPS * 32, 0, stream>>>(p, depth, ws.logits);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_sm90_moe_route(MoeParams const& p, Sm90MoeWorkspace const& ws,
                                  cudaStream_t stream) {
  static_assert(kMaxTopK <= 32, "lane k keeps choice k");
  // A step of few tokens needs many warps to read the router at the memory's speed.
  auto* logits = p.tokens <= 8                        ? launch_logits<1, 4>
                 : p.tokens <= 256                    ? launch_logits<8, 4>
                 : p.tokens < SM90_ROUTER_LONG_TOKENS ? launch_logits<8, 1>
                                                      : launch_sm90_moe_long_logits;
  cudaError_t status = logits(p, ws, stream);
  if (status != cudaSuccess) return status;
  // Many threads for the many partial sums of each token; long steps have few.
  int const count = p.tokens <= 2048 ? 1 : SELECT_THREADS / 32;
  auto const blocks = static_cast<unsigned>(ceil_div(p.tokens, count));
  size_t const bytes = static_cast<size_t>(count) * p.experts * 8;
  status = launch_behind(sm90_moe_select, blocks, SELECT_THREADS, bytes, stream, p, ws,
                         sm90_router_splits(p.tokens, p.hidden), count);
  if (status != cudaSuccess) return status;
  auto const threads = static_cast<unsigned>(
      std::clamp<int64_t>(ceil_div(p.tokens * p.top_k, 32) * 32, 64, PERMUTE_THREADS));
  return launch_behind(sm90_moe_permute, static_cast<unsigned>(p.experts + 1), threads, 0, stream,
                       p, ws);
}

}  // namespace m3::kernels
