#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "kernels/types.h"

namespace m3 {

// y[M, N] = x[M, K] * weight[N, K]^T (+ bias[N]), row-major, accumulated in fp32, rounded once.
// bf16 products are exact; float32 runs in true fp32, not TF32. The bias has y's type.
struct Matmul {
  void const* x;
  void const* weight;
  void const* bias;  // nullptr: none
  void* y;
  int64_t m, n, k;
  kernels::Type in_type;   // of x and weight: kFloat32 or kBfloat16
  kernels::Type out_type;  // kFloat32, or in_type
};

// What matmul() may use as workspace at most.
constexpr size_t kMatmulWorkspaceBytes = size_t{32} << 20;

// Runs on `stream` through cuBLASLt, which is opened on first use. The algorithm is asked for once
// per shape, types, alignment and device, and kept for the process. Throws Error when the library
// is not found or refuses the shape. `workspace` holds kMatmulWorkspaceBytes, 256-byte aligned.
void matmul(Matmul const& problem, void* workspace, cudaStream_t stream);

}  // namespace m3
