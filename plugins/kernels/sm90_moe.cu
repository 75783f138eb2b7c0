#include <algorithm>

#include "kernels/sm90_moe_plan.h"

namespace m3::kernels {

cudaError_t launch_sm90_moe(MoeParams const& p, void* workspace, cudaStream_t stream) {
  if (p.tokens == 0) return cudaSuccess;
  bool const supported = sm90_moe_supports(p) && p.experts <= kMaxExperts &&
                         p.top_k <= std::min(kMaxTopK, p.experts) && p.parts >= 1 &&
                         p.parts <= kMaxExpertParts && p.experts % p.parts == 0 &&
                         p.tokens <= kSm90MoeSlabTokens;
  if (!supported) return cudaErrorInvalidValue;
  Sm90MoeWorkspace ws{};
  sm90_moe_carve(p, workspace, ws);
  if (sm90_moe_decode_takes(p)) {
    cudaError_t const status = launch_sm90_moe_decode_router(p, ws, stream);
    return status == cudaSuccess ? launch_sm90_moe_decode(p, ws, stream) : status;
  }
  for (auto* stage :
       {launch_sm90_moe_route, launch_sm90_moe_fc, launch_sm90_moe_proj, launch_sm90_moe_combine}) {
    if (cudaError_t const status = stage(p, ws, stream); status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace m3::kernels
