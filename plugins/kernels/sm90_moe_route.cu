#include <algorithm>

#include "kernels/dependent_launch.h"
#include "kernels/numeric.cuh"
#include "kernels/sm90_moe_stages.h"
#include "kernels/sm90_ptx.cuh"

namespace m3::kernels {
namespace {

constexpr int WARP_EXPERTS = 16;  // M of one tensor core instruction
constexpr int SELECT_THREADS = 128;
constexpr int PERMUTE_THREADS = 1024;

// Three bf16 values whose sum is the fp32 one: 8 + 8 + 8 bits of mantissa. Their products with bf16
// are exact in fp32.
__device__ void split(float x, float y, uint32_t (&parts)[3]) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    __nv_bfloat162 const part = __floats2bfloat162_rn(x, y);
    parts[i] = reinterpret_cast<uint32_t const&>(part);
    x -= __low2float(part);
    y -= __high2float(part);
  }
}

// Partial logits of TILES * 8 tokens over one part of hidden; a warp takes 16 experts. Lane l reads
// elements 8 (l % 4) .. + 7 of each 32 for both operands: the order of K is free.
template <int TILES>
__global__ void __launch_bounds__(256)
    sm90_moe_logits(MoeParams p, int64_t split_depth, float* __restrict__ logits) {
  int const lane = threadIdx.x % 32;
  int const warp = threadIdx.x / 32;
  int const expert0 = (blockIdx.z * (blockDim.x / 32) + warp) * WARP_EXPERTS;
  int64_t const token0 = int64_t{blockIdx.x} * TILES * 8;
  ptx::allow_next_kernel();
  if (expert0 >= p.experts) return;
  int64_t const begin = blockIdx.y * split_depth;
  int64_t const end = min(begin + split_depth, p.hidden);
  int const column = lane % 4 * 8;
  float const* weight[2];
  for (int i = 0; i < 2; ++i) {
    int const expert = min(expert0 + lane / 4 + 8 * i, p.experts - 1);
    weight[i] = p.router_weight + expert * p.hidden + column;
  }
  __nv_bfloat16 const* x[TILES];
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    int64_t const token = min(token0 + t * 8 + lane / 4, p.tokens - 1);
    x[t] = static_cast<__nv_bfloat16 const*>(p.x) + token * p.hidden + column;
  }

  float sums[TILES][4] = {};
  for (int64_t k = begin; k < end; k += 64) {
    float part[TILES][4] = {};  // short sums: the tensor cores truncate
#pragma unroll
    for (int step = 0; step < 64; step += 32) {
      uint32_t a[2][3][4];  // of the two K = 16 instructions, of the three parts
#pragma unroll
      for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float4 const w = __ldg(reinterpret_cast<float4 const*>(weight[row] + k + step) + half);
          uint32_t low[3], high[3];
          split(w.x, w.y, low);
          split(w.z, w.w, high);
#pragma unroll
          for (int i = 0; i < 3; ++i) {
            a[half][i][row] = low[i];
            a[half][i][row + 2] = high[i];
          }
        }
      }
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        uint4 const b = __ldg(reinterpret_cast<uint4 const*>(x[t] + k + step));
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

// Unsigned order of floats; NaN lowest, and 0 stands for an expert that is taken.
__device__ uint32_t rank_of(float score) {
  if (isnan(score)) return 1;
  uint32_t const bits = __float_as_uint(score + 0.0f);  // -0 = 0
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// One block a token: adds the partial logits in order, then chooses the top_k.
__global__ void __launch_bounds__(SELECT_THREADS)
    sm90_moe_select(MoeParams p, Sm90MoeWorkspace ws, int splits) {
  __shared__ float probabilities[kMaxExperts];
  __shared__ uint32_t ranks[kMaxExperts];
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();
  int64_t const token = blockIdx.x;
  int const lane = threadIdx.x % 32;
  int32_t* ids = ws.expert_ids + token * p.top_k;
  float* weights = ws.expert_weights + token * p.top_k;
  if (p.first_token + token >= *p.real_tokens) {
    if (threadIdx.x < p.top_k) {
      ids[lane] = -1;
      weights[lane] = 0.0f;
    }
    return;
  }
  for (int e = threadIdx.x; e < p.experts; e += SELECT_THREADS) {
    float const* logit = ws.logits + token * p.experts + e;
    float sum = 0.0f;
#pragma unroll 8
    for (int s = 0; s < splits; ++s) sum += logit[s * p.tokens * p.experts];
    float const probability = 1.0f / (1.0f + expf(-sum));
    probabilities[e] = probability;
    ranks[e] = rank_of(probability + p.router_bias[e]);
  }
  __syncthreads();  // probabilities and ranks
  if (threadIdx.x >= 32) return;
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

// Block e lists the rows of expert e in ascending order. Its first place is the number of rows with
// a lower expert, which it counts itself: no atomics, so the order never varies. The last block
// lists the shared expert's.
__global__ void __launch_bounds__(PERMUTE_THREADS)
    sm90_moe_permute(MoeParams p, Sm90MoeWorkspace ws) {
  constexpr int WARPS = PERMUTE_THREADS / 32;
  __shared__ int counts[WARPS];
  ptx::wait_for_previous_kernel();
  ptx::allow_next_kernel();
  int const expert = blockIdx.x;
  int const warp = threadIdx.x / 32;
  int const lane = threadIdx.x % 32;
  int const slots = p.top_k + 1;
  auto const real = static_cast<int>(
      max(int64_t{0}, min(p.tokens, int64_t{*p.real_tokens} - p.first_token)));
  int const pairs = real * p.top_k;
  if (expert == p.experts) {
    for (int i = threadIdx.x; i < 2 * SM90_MOE_MAX_CTAS; i += blockDim.x) ws.arrivals[i] = 0;
    for (int i = threadIdx.x; i < real; i += blockDim.x) ws.rows[pairs + i] = i * slots + p.top_k;
    if (threadIdx.x == 0) {
      ws.expert_begin[expert] = pairs;
      ws.expert_begin[expert + 1] = pairs + real;
    }
    return;
  }

  int lower = 0;
  for (int i = threadIdx.x; i < pairs; i += blockDim.x) lower += ws.expert_ids[i] < expert;
  lower = __reduce_add_sync(~0u, lower);
  if (lane == 0) counts[warp] = lower;
  __syncthreads();  // counts of lower experts
  int place = 0;
  for (int w = 0; w < blockDim.x / 32; ++w) place += counts[w];
  if (threadIdx.x == 0) ws.expert_begin[expert] = place;
  __syncthreads();  // counts are read

  for (int start = 0; start < pairs; start += blockDim.x) {
    int const i = start + threadIdx.x;
    bool const mine = i < pairs && ws.expert_ids[i] == expert;
    unsigned const ballot = __ballot_sync(~0u, mine);
    if (lane == 0) counts[warp] = __popc(ballot);
    __syncthreads();  // counts of this round are written
    int before = 0;
    int total = 0;
    for (int w = 0; w < blockDim.x / 32; ++w) {
      before += w < warp ? counts[w] : 0;
      total += counts[w];
    }
    if (mine) {
      ws.rows[place + before + __popc(ballot & ((1u << lane) - 1))] =
          i / p.top_k * slots + i % p.top_k;
    }
    place += total;
    __syncthreads();  // counts are read before the next round overwrites them
  }
}

template <int TILES>
cudaError_t launch_logits(MoeParams const& p, float* logits, cudaStream_t stream) {
  int const splits = sm90_router_splits(p.tokens, p.hidden);
  // A step of few tokens needs many small blocks to read the router at the memory's speed.
  int const warps = p.tokens <= SM90_ROUTER_TOKENS ? 2 : 8;
  dim3 const grid(static_cast<unsigned>(ceil_div(p.tokens, TILES * 8)), splits,
                  static_cast<unsigned>(ceil_div(p.experts, warps * WARP_EXPERTS)));
  int64_t const depth = ceil_div(p.hidden / 64, splits) * 64;
  sm90_moe_logits<TILES><<<grid, warps * 32, 0, stream>>>(p, depth, logits);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_sm90_moe_route(MoeParams const& p, Sm90MoeWorkspace const& ws,
                                  cudaStream_t stream) {
  static_assert(kMaxTopK <= 32, "lane k keeps choice k");
  cudaError_t status = p.tokens <= 8 ? launch_logits<1>(p, ws.logits, stream)
                                     : launch_logits<8>(p, ws.logits, stream);
  if (status != cudaSuccess) return status;
  status = launch_dependent(sm90_moe_select, static_cast<unsigned>(p.tokens), SELECT_THREADS, 0,
                            stream, p, ws, sm90_router_splits(p.tokens, p.hidden));
  if (status != cudaSuccess) return status;
  auto const threads = static_cast<unsigned>(
      std::clamp<int64_t>(ceil_div(p.tokens * p.top_k, 32) * 32, 64, PERMUTE_THREADS));
  return launch_dependent(sm90_moe_permute, static_cast<unsigned>(p.experts + 1), threads, 0,
                          stream, p, ws);
}

}  // namespace m3::kernels
