#pragma once

#include <cuda_runtime_api.h>

#include "kernels/packed_tokens.h"
#include "kernels/types.h"

namespace m3::kernels {

// A cache is e4m3 exactly when its scale is given: stored = value / scale, saturating. Otherwise it
// has the type of the activations.
struct CacheUpdateParams {  // shapes: N tokens, P pages, B = 128, D = 128
  PackedTokens tokens;
  void const* qkv;              // [N, (Hq + 2 Hkv) * D (+ (Hi + 1) * D)], rows q, k, v, iq, ik
  int32_t const* position_ids;  // [N], what the rotation uses
  void* kv_cache;               // [P, 2, B, Hkv, D]
  float const* kv_scale;        // [1] or null
  float const* inv_freq;        // [rotary_dim / 2]
  float const* q_norm;          // [D]
  float const* k_norm;          // [D]
  void* index_cache;          // [P, B, D]; null on layers without an index branch, as are the next
  float const* index_scale;   // [1] or null
  float const* index_q_norm;  // [D]
  float const* index_k_norm;  // [D]
  void* q;                    // out [N, Hq, D]; zero for padding
  void* index_q;              // out [N, Hi, D]; zero for padding
  int32_t num_heads;          // Hq
  int32_t num_kv_heads;       // Hkv
  int32_t num_index_heads;    // Hi, 0 without an index branch
  int32_t rotary_dim;         // a multiple of 16, at most D
  float epsilon;
  Type type;  // fp32 or bf16
};

// Per-head RMS norm and partial NeoX rotation of q, k and their index twins in fp32; K, V and index
// K go to their slot of the pages. Padding tokens and pages of -1 write nothing.
cudaError_t launch_cache_update(CacheUpdateParams const& p, cudaStream_t stream);

}  // namespace m3::kernels
