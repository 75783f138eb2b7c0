#pragma once

#include "kernels/sm90_moe_math.cuh"
#include "kernels/sm90_moe_stages.h"
#include "kernels/sm90_ptx.cuh"

// From the router's logits to what a decode step has to visit. Every CTA makes these tables for
// itself: cheaper than a kernel of its own.
namespace m3::kernels {

constexpr int SM90_MOE_DECODE_WARPS = 16;  // that plan and multiply

// In shared memory. Visit 0 is the shared expert, the others are the chosen experts, each once.
// Places number the rows of activations: those of visit 0, of visit 1, ..., by token.
struct MoeDecodePlan {
  static constexpr int PLACES = SM90_MOE_DECODE_TOKENS * (SM90_MOE_DECODE_TOP_K + 1);

  float bias[SM90_MOE_DECODE_EXPERTS];
  uint32_t tokens_of[SM90_MOE_DECODE_EXPERTS];  // bit sets
  int first_place[SM90_MOE_DECODE_EXPERTS];     // of chosen experts
  int visits;
  int visit_expert[SM90_MOE_DECODE_VISITS];
  uint32_t visit_tokens[SM90_MOE_DECODE_VISITS];  // bit sets
  int visit_place[SM90_MOE_DECODE_VISITS];        // the first
  int place_token[PLACES];
  float place_weight[PLACES];

  // All threads of the block; a barrier must follow.
  __device__ void prepare(MoeParams const& p) {
    for (int i = threadIdx.x; i < p.experts; i += blockDim.x) {
      tokens_of[i] = 0;
      bias[i] = p.router_bias[i];
    }
  }

  // The warps that plan and multiply; `barrier` is theirs.
  __device__ void make(MoeParams const& p, float const* logits, int barrier) {
    constexpr int WARPS = SM90_MOE_DECODE_WARPS;
    constexpr int EACH = SM90_MOE_DECODE_EXPERTS / 32;
    int const lane = threadIdx.x % 32;
    int const token = static_cast<int>(threadIdx.x) / 32;
    auto const real = static_cast<int>(
        max(int64_t{0}, min(p.tokens, int64_t{__ldg(p.real_tokens)} - p.first_token)));
    int id = 0;
    float weight = 0.0f;
    if (token < p.tokens) {
      float const* mine = logits + token * p.experts;
      if (p.experts <= SM90_MOE_DECODE_EXPERTS / 2) {
        choose<EACH / 2>(p, mine, id, weight);
      } else {
        choose<EACH>(p, mine, id, weight);
      }
    }
    bool const chooses = token < real && lane < p.top_k;
    if (chooses) atomicOr(&tokens_of[id], 1u << token);
    ptx::named_barrier(barrier, WARPS * 32);  // tokens_of
    if (token == 0) list_visits(p, real);
    if (token == 1 && lane < real) {
      place_token[lane] = lane;
      place_weight[lane] = 1.0f;
    }
    ptx::named_barrier(barrier, WARPS * 32);  // first_place
    if (chooses) {
      int const place = first_place[id] + rank(tokens_of[id], token);
      place_token[place] = token;
      place_weight[place] = weight;
    }
    ptx::named_barrier(barrier, WARPS * 32);  // places
  }

  // Members of the set before `token`
  __device__ static int rank(uint32_t set, int token) { return __popc(set & ((1u << token) - 1)); }

 private:
  // The choice of one token, by one warp, each lane with so many experts; lane k gets choice k.
  // `logits` are sums of parts.
  template <int EACH>
  __device__ void choose(MoeParams const& p, float const* logits, int& id, float& weight) const {
    constexpr int BATCH = 4;  // loads in flight together, of each expert
    static_assert(SM90_MOE_DECODE_SPLITS % BATCH == 0, "whole batches");
    int const lane = threadIdx.x % 32;
    int64_t const stride = p.tokens * p.experts;
    float logit[EACH] = {};
    for (int first = 0; first < SM90_MOE_DECODE_SPLITS; first += BATCH) {
      float parts[EACH][BATCH];
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
#pragma unroll
        for (int s = 0; s < BATCH; ++s) {
          float const* from = logits + (first + s) * stride + lane + 32 * i;
          parts[i][s] = lane + 32 * i < p.experts ? __ldcg(from) : 0.0f;
        }
      }
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
#pragma unroll
        for (int s = 0; s < BATCH; ++s) logit[i] += parts[i][s];
      }
    }
    float probability[EACH];
    uint32_t ranks[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      int const e = lane + 32 * i;
      ranks[i] = 0;
      if (e < p.experts) {
        probability[i] = 1.0f / (1.0f + expf(-logit[i]));
        ranks[i] = rank_of(probability[i] + bias[e]);
      }
    }
    float sum = 0.0f;
    for (int k = 0; k < p.top_k; ++k) {
      uint32_t best = 0;
      int mine = 0;
      float value = 0.0f;
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        if (ranks[i] > best) {
          best = ranks[i];
          mine = lane + 32 * i;
          value = probability[i];
        }
      }
      uint32_t const top = __reduce_max_sync(~0u, best);
      int const chosen = __reduce_min_sync(~0u, best == top ? mine : p.experts);  // ties: the lower
      value = __shfl_sync(~0u, value, chosen % 32);
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        if (chosen == lane + 32 * i) ranks[i] = 0;
      }
      sum += value;
      if (lane == k) {
        id = chosen;
        weight = value;
      }
    }
    weight = p.scale * (weight / sum);
  }

  // One warp. A lane takes every 32nd expert: what comes before its own are sums over lanes.
  __device__ void list_visits(MoeParams const& p, int real) {
    constexpr int EACH = SM90_MOE_DECODE_EXPERTS / 32;
    int const lane = threadIdx.x % 32;
    uint32_t sets[EACH];
    int mine = 0;  // places in the upper half, visits in the lower
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      int const e = lane + 32 * i;
      sets[i] = e < p.experts ? tokens_of[e] : 0;
      mine += __popc(sets[i]) << 16 | (sets[i] != 0);
    }
    int sum = mine;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      int const other = __shfl_up_sync(~0u, sum, offset);
      if (lane >= offset) sum += other;
    }
    int place = real + ((sum - mine) >> 16);
    int visit = 1 + ((sum - mine) & 0xffff);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      if (sets[i] == 0) continue;
      int const e = lane + 32 * i;
      first_place[e] = place;
      visit_expert[visit] = e;
      visit_tokens[visit] = sets[i];
      visit_place[visit] = place;
      ++visit;
      place += __popc(sets[i]);
    }
    if (lane == 0) {
      visit_tokens[0] = (1u << real) - 1;
      visit_place[0] = 0;
    }
    if (lane == 31) visits = visit;
  }
};

}  // namespace m3::kernels
