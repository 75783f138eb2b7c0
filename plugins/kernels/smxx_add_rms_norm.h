#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/types.h"

namespace m3::kernels {

constexpr int64_t kMaxNormBytes = 48 << 10;  // of a row

// sum = x + residual, rounded to T; normed = sum * rsqrt(mean(sum^2) + epsilon) * weight in fp32,
// rounded once.
struct AddRmsNormParams {  // shapes: M rows of H, of which N are normed
  void const* x;           // T [M, H]
  void const* residual;    // T [M, H], or null: x alone
  float const* weight;     // [H]
  int32_t const* rows;     // [N] which rows, or null: all of them in order
  void* normed;            // T [N, H]
  void* sum;               // T [N, H], or null: not wanted
  int64_t num_rows;        // N
  int32_t hidden;          // H, a multiple of 8
  float epsilon;
  Type type;  // T: fp32 or bf16
};

// cudaErrorInvalidValue: the type is another, or a row is longer than kMaxNormBytes.
cudaError_t launch_add_rms_norm(AddRmsNormParams const& p, cudaStream_t stream);

}  // namespace m3::kernels
