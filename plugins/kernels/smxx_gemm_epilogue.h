#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/types.h"

namespace m3::kernels {

// out = act(sums + bias), all in fp32, rounded once. cuBLASLt's own GELU is the tanh one.
struct GemmEpilogueParams {
  float const* sums;  // [rows, cols]; may be `out` itself when out_type is kFloat32
  void const* bias;   // [cols] of bias_type, or nullptr
  void* out;          // [rows, cols] of out_type
  int64_t rows, cols;
  Type bias_type;  // kFloat32 or kBfloat16
  Type out_type;   // kFloat32 or kBfloat16
  bool gelu_erf;   // 0.5 x (1 + erf(x / sqrt 2))
};

cudaError_t launch_gemm_epilogue(GemmEpilogueParams const& p, cudaStream_t stream);

}  // namespace m3::kernels
