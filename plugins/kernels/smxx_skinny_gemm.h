#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/types.h"

namespace m3::kernels {

// y = x weight^T for the few rows of a decode step: products of bf16 summed in fp32, rounded once.
// The weights may be read while the kernel in front still runs, so nothing of a step writes them.
struct SkinnyGemmParams {
  void const* x;       // bf16 [M, K]
  void const* weight;  // bf16 [N, K]
  void* y;             // [M, N]
  int64_t m, n, k;
  Type out_type;  // of y: fp32 or bf16
};

// M up to 8, K a multiple of 128 that leaves the weights enough of the shared memory, 16-byte
// aligned operands, code for compute capability 9.0 or later.
bool has_skinny_gemm(SkinnyGemmParams const& p);
cudaError_t launch_skinny_gemm(SkinnyGemmParams const& p, cudaStream_t stream);

}  // namespace m3::kernels
