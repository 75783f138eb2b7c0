#pragma once

#include <cuda_bf16.h>

#include "kernels/sm90_moe.h"

// The launches that make up launch_sm90_moe. A token has top_k + 1 "rows", one for each choice and
// the last for the shared expert: row = token * (top_k + 1) + slot. A "place" numbers the rows of
// real tokens in the order of (expert, token), the shared expert last, as expert number `experts`.
namespace m3::kernels {

constexpr int SM90_MOE_MAX_CTAS = 144;  // of the expert GEMMs, one for each multiprocessor
// Counters that begin at zero: `arrivals`, `done`
constexpr int SM90_MOE_COUNTERS = 2 * SM90_MOE_MAX_CTAS + kMaxExperts + 1;
constexpr int SM90_MOE_MAX_TOKENS = 160;   // of one tile
constexpr int SM90_MOE_SHORT_TOKENS = 40;  // of an expert on average: tiles of 64 and less
constexpr int SM90_MOE_WEIGHT_ROWS = 256;  // of one tile
constexpr int SM90_ROUTER_MAX_SPLITS = 24;
constexpr int SM90_ROUTER_TOKENS = 64;        // of one block, at most
constexpr int SM90_ROUTER_LONG_TOKENS = 512;  // from so many on wgmma makes the logits
constexpr int SM90_MOE_DECODE_TOKENS = 8;     // so few take the launches for decode steps
constexpr int SM90_MOE_DECODE_HIDDEN = 6144;  // at most
constexpr int SM90_MOE_DECODE_EXPERTS = 256;  // at most
constexpr int SM90_MOE_DECODE_TOP_K = 8;      // at most
constexpr int SM90_MOE_DECODE_SPLITS = 8;     // parts of hidden, of the router
// Experts that a decode step reads: the shared one and those chosen.
constexpr int SM90_MOE_DECODE_VISITS = 1 + SM90_MOE_DECODE_TOKENS * SM90_MOE_DECODE_TOP_K;

struct MoeFour;  // sm90_moe_math.cuh

struct Sm90MoeWorkspace {
  float* logits;                // [router splits, tokens, experts] partial sums
  __nv_bfloat16* router_parts;  // [3, experts, hidden] their sum is the router, in long steps
  int32_t* expert_ids;          // [tokens, top_k]; -1 for padding tokens
  float* expert_weights;        // [tokens, top_k], scale included
  int32_t* rows;                // [tokens * (top_k + 1)] row of each place
  int32_t* places;              // [tokens * (top_k + 1)] place of each row
  int32_t* expert_begin;        // [experts + 2] first place of each expert, end
  int32_t* arrivals;            // [2, SM90_MOE_MAX_CTAS] CTAs that finished their part of a tile;
                                // where tiles are never cut, the first counts tickets
  int32_t* done;                // [experts + 1] warps that have written their activations of a tile
  int32_t* ready;               // [SM90_MOE_DECODE_VISITS] parts of activations that are done
  __nv_bfloat16* activations;   // [tokens * (top_k + 1), width] by place
  MoeFour* outputs;             // [tokens * (top_k + 1), hidden / 4] by place
  float* partials;              // [2 * SM90_MOE_MAX_CTAS, tile] sums over a part of K
};

// Number of parts that the router cuts `hidden` into.
int sm90_router_splits(int64_t tokens, int64_t hidden);

cudaError_t launch_sm90_moe_long_logits(MoeParams const& p, Sm90MoeWorkspace const& ws,
                                        cudaStream_t stream);
// Makes expert_ids, expert_weights, rows, places, expert_begin and zeroes the counters.
cudaError_t launch_sm90_moe_route(MoeParams const& p, Sm90MoeWorkspace const& ws,
                                  cudaStream_t stream);
cudaError_t launch_sm90_moe_fc(MoeParams const& p, Sm90MoeWorkspace const& ws, cudaStream_t stream);
cudaError_t launch_sm90_moe_proj(MoeParams const& p, Sm90MoeWorkspace const& ws,
                                 cudaStream_t stream);
cudaError_t launch_sm90_moe_combine(MoeParams const& p, Sm90MoeWorkspace const& ws,
                                    cudaStream_t stream);
// Decode steps take two launches instead: partial logits and zeroed `ready`, then the rest.
bool sm90_moe_decode_takes(MoeParams const& p);
cudaError_t launch_sm90_moe_decode_router(MoeParams const& p, Sm90MoeWorkspace const& ws,
                                          cudaStream_t stream);
cudaError_t launch_sm90_moe_decode(MoeParams const& p, Sm90MoeWorkspace const& ws,
                                   cudaStream_t stream);

}  // namespace m3::kernels
