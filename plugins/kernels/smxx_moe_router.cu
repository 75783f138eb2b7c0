#include <cmath>

#include "kernels/numeric.cuh"
#include "kernels/smxx_moe_stages.h"

namespace m3::kernels {
namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int TOKENS = 4;  // a block: each router row is read once for all of them

// The best expert that is not taken yet: higher score, then lower id. NaN ranks below every number.
__device__ int next_expert(float const* scores, bool const* taken, int experts, int lane) {
  float best = -INFINITY;
  int id = -1;
  for (int e = lane; e < experts; e += 32) {
    if (taken[e]) continue;
    float const score = isnan(scores[e]) ? -INFINITY : scores[e];
    if (id < 0 || score > best) {
      best = score;
      id = e;
    }
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    float const other = __shfl_xor_sync(~0u, best, offset);
    int const other_id = __shfl_xor_sync(~0u, id, offset);
    bool const better =
        other_id >= 0 && (id < 0 || other > best || (other == best && other_id < id));
    if (better) {
      best = other;
      id = other_id;
    }
  }
  return id;
}

template <class T>
__global__ void __launch_bounds__(THREADS)
    moe_router(MoeParams p, int32_t* __restrict__ expert_ids, float* __restrict__ expert_weights) {
  __shared__ float probabilities[TOKENS][kMaxExperts];
  __shared__ float scores[TOKENS][kMaxExperts];  // probability + bias: what the selection ranks
  __shared__ bool taken[TOKENS][kMaxExperts];
  int const warp = threadIdx.x / 32;
  int const lane = threadIdx.x % 32;
  int64_t const first = int64_t{blockIdx.x} * TOKENS;
  T const* x = static_cast<T const*>(p.x) + first * p.hidden;
  int const count = static_cast<int>(min(int64_t{TOKENS}, p.tokens - first));

  // Logits: one warp per expert, fp32
  for (int e = warp; e < p.experts; e += WARPS) {
    float const* row = p.router_weight + int64_t{e} * p.hidden;
    float sums[TOKENS] = {};
    for (int64_t h = lane; h < p.hidden; h += 32) {
      float const w = row[h];
#pragma unroll
      for (int t = 0; t < TOKENS; ++t) {
        if (t < count) sums[t] = fmaf(to_float(x[t * p.hidden + h]), w, sums[t]);
      }
    }
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      float const logit = warp_sum(sums[t]);
      if (lane == 0) {
        float const probability = 1.0f / (1.0f + expf(-logit));
        probabilities[t][e] = probability;
        scores[t][e] = probability + p.router_bias[e];
        taken[t][e] = false;
      }
    }
  }
  __syncthreads();  // probabilities, scores, taken are complete

  // Selection: one warp per token
  if (warp >= count) return;
  int32_t* ids = expert_ids + (first + warp) * p.top_k;
  float* weights = expert_weights + (first + warp) * p.top_k;
  if (p.first_token + first + warp >= *p.real_tokens) {
    for (int k = lane; k < p.top_k; k += 32) {
      ids[k] = -1;
      weights[k] = 0.0f;
    }
    return;
  }
  int my_id = 0;  // lane k keeps choice k
  float sum = 0.0f;
  for (int k = 0; k < p.top_k; ++k) {
    int const id = next_expert(scores[warp], taken[warp], p.experts, lane);
    __syncwarp();  // every lane has read taken
    if (lane == 0) taken[warp][id] = true;
    __syncwarp();  // taken, before the next round reads it
    sum += probabilities[warp][id];
    if (lane == k) my_id = id;
  }
  if (lane < p.top_k) {
    ids[lane] = my_id;
    weights[lane] = p.scale * (probabilities[warp][my_id] / sum);
  }
}

}  // namespace

cudaError_t launch_moe_router(MoeParams const& p, MoeWorkspace const& ws, cudaStream_t stream) {
  static_assert(kMaxTopK <= 32, "lane k keeps choice k");
  static_assert(TOKENS <= WARPS, "one warp selects for each token");
  auto const blocks = static_cast<unsigned>(ceil_div(p.tokens, TOKENS));
  if (p.type == Type::kFloat32) {
    moe_router<float><<<blocks, THREADS, 0, stream>>>(p, ws.expert_ids, ws.expert_weights);
  } else {
    moe_router<__nv_bfloat16><<<blocks, THREADS, 0, stream>>>(p, ws.expert_ids, ws.expert_weights);
  }
  return cudaGetLastError();
}

}  // namespace m3::kernels
