#pragma once

#include "kernels/smxx_moe.h"

// The launches that make up launch_moe, one file each. A "pair" is one (token, chosen expert):
// pair = token * top_k + slot.
namespace m3::kernels {

constexpr int MOE_TILE_ROWS = 64;

// One tile of pairs that share an expert: places first..end-1 of the expert order; expert -1: none.
struct MoeTile {
  int32_t expert, first, end;
};

struct MoeWorkspace {
  int32_t* expert_ids;       // [tokens, top_k]; -1 for padding tokens
  float* expert_weights;     // [tokens, top_k], scale included
  int32_t* sorted_pairs;     // [tokens * top_k] pairs by (expert, pair)
  int32_t* expert_begin;     // [experts + 1] first place of each expert in sorted_pairs
  MoeTile* tiles;            // [moe_max_tiles]
  void* activations;         // T [tokens * top_k, width], in expert order
  float* pair_outputs;       // [tokens * top_k, hidden], by pair
  void* shared_activations;  // T [tokens, shared_width]
  float* shared_outputs;     // [tokens, hidden]
};

// Upper bound of tiles over all ways to spread the pairs.
int64_t moe_max_tiles(MoeParams const& p);

cudaError_t launch_moe_router(MoeParams const& p, MoeWorkspace const& ws, cudaStream_t stream);
cudaError_t launch_moe_permute(MoeParams const& p, MoeWorkspace const& ws, cudaStream_t stream);
cudaError_t launch_moe_experts(MoeParams const& p, MoeWorkspace const& ws, cudaStream_t stream);
cudaError_t launch_moe_combine(MoeParams const& p, MoeWorkspace const& ws, cudaStream_t stream);

}  // namespace m3::kernels
