#include <algorithm>

#include "kernels/carver.h"
#include "kernels/smxx_moe.h"
#include "kernels/smxx_moe_stages.h"

namespace m3::kernels {
namespace {

size_t carve(MoeParams const& p, void* base, MoeWorkspace& ws) {
  int64_t const pairs = p.tokens * p.top_k;
  int64_t const element = p.type == Type::kFloat32 ? 4 : 2;
  Carver carver(base);
  carver.take(ws.expert_ids, pairs);
  carver.take(ws.expert_weights, pairs);
  carver.take(ws.sorted_pairs, pairs);
  carver.take(ws.expert_begin, p.experts + 1);
  carver.take(ws.tiles, moe_max_tiles(p));
  carver.take_bytes(ws.activations, pairs * p.width * element);
  carver.take(ws.pair_outputs, pairs * p.hidden);
  carver.take_bytes(ws.shared_activations, p.tokens * p.shared_width * element);
  carver.take(ws.shared_outputs, p.tokens * p.hidden);
  return carver.used();
}

}  // namespace

int64_t moe_max_tiles(MoeParams const& p) {
  int64_t const pairs = p.tokens * p.top_k;
  return pairs / MOE_TILE_ROWS + std::min<int64_t>(p.experts, pairs);
}

size_t moe_workspace_bytes(MoeParams const& p) {
  MoeWorkspace ws{};
  return carve(p, nullptr, ws);
}

cudaError_t launch_moe(MoeParams const& p, void* workspace, cudaStream_t stream) {
  if (p.tokens == 0 || p.hidden == 0) return cudaSuccess;
  bool const supported = (p.type == Type::kFloat32 || p.type == Type::kBfloat16) &&
                         p.experts <= kMaxExperts && p.top_k <= std::min(kMaxTopK, p.experts) &&
                         p.parts >= 1 && p.parts <= kMaxExpertParts && p.experts % p.parts == 0;
  if (!supported) return cudaErrorInvalidValue;
  MoeWorkspace ws{};
  carve(p, workspace, ws);
  for (auto* stage :
       {launch_moe_router, launch_moe_permute, launch_moe_experts, launch_moe_combine}) {
    if (cudaError_t const status = stage(p, ws, stream); status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace m3::kernels
