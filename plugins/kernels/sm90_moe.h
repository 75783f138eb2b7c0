#pragma once

#include "kernels/smxx_moe.h"

// The mixture of experts for compute capability 9.0, bf16. Same contract as launch_moe.
namespace m3::kernels {

// Whether the sizes and pointers suit it: bf16, hidden and width multiples of 64, the shared expert
// as wide as the others and none too wide for 32-bit offsets, 16-byte aligned tensors. Null
// pointers count as aligned.
bool sm90_moe_supports(MoeParams const& p);

// Bytes of workspace for p.tokens tokens or fewer; pointers are not looked at.
size_t sm90_moe_workspace_bytes(MoeParams const& p);

// Tokens that one launch may take; longer steps run slab by slab.
constexpr int64_t kSm90MoeSlabTokens = 8192;

// Only in libraries compiled with sm_90a code. Encodes TMA descriptors on the host at each call.
cudaError_t launch_sm90_moe(MoeParams const& p, void* workspace, cudaStream_t stream);

}  // namespace m3::kernels
