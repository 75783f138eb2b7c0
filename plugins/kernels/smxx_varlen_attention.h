#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/types.h"

namespace m3::kernels {

constexpr int kMaxVarlenHeadSize = 128;

// Bidirectional attention inside each segment of packed rows. T = type; softmax in fp32.
struct VarlenAttentionParams {
  void const* q;  // T [rows, heads, head_size]; k and v likewise
  void const* k;
  void const* v;
  int32_t const* cu_seqlens;  // [segments + 1] ascending; rows of no segment get zeros
  void* out;                  // T [rows, heads * head_size]
  int64_t rows;
  int32_t heads, head_size, segments;
  float softmax_scale;
  Type type;  // kFloat32 or kBfloat16
};

cudaError_t launch_varlen_attention(VarlenAttentionParams const& p, cudaStream_t stream);

}  // namespace m3::kernels
