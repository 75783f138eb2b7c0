#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/types.h"

namespace m3::kernels {

constexpr int kMaxExpertParts = 8;
constexpr int kMaxExperts = 1024;
constexpr int kMaxTopK = 32;

// Mixture of experts over one slab of tokens. T = type. Nothing depends on the order in which
// blocks run: the same input gives the same bits.
struct MoeParams {
  void const* x;                      // T [tokens, hidden]
  void* y;                            // T [tokens, hidden]
  int32_t const* real_tokens;         // device, one int: tokens at or beyond it get zeros
  int64_t first_token;                // of the slab, in the numbering of real_tokens
  float const* router_weight;         // [experts, hidden]
  float const* router_bias;           // [experts], for the selection only
  void const* fc[kMaxExpertParts];    // T [experts / parts, 2 width, hidden]: gate rows, up rows
  void const* proj[kMaxExpertParts];  // T [experts / parts, hidden, width]
  void const* shared_fc;              // T [2 shared_width, hidden]
  void const* shared_proj;            // T [hidden, shared_width]
  int64_t tokens, hidden, width, shared_width;
  int32_t experts, parts, top_k;
  float scale;  // of the routed sum
  float swiglu_alpha, swiglu_limit;
  Type type;  // kFloat32 or kBfloat16
};

// Bytes of workspace for the params' sizes; pointers are not looked at.
size_t moe_workspace_bytes(MoeParams const& p);

cudaError_t launch_moe(MoeParams const& p, void* workspace, cudaStream_t stream);

}  // namespace m3::kernels
