#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "kernels/types.h"

// Conversions and reductions that every kernel uses. All arithmetic is fp32; from_float rounds once
// (nearest even; e4m3 saturates).
namespace m3::kernels {

__device__ inline float to_float(float x) {
  return x;
}
__device__ inline float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
__device__ inline float to_float(__nv_fp8_e4m3 x) {
  return static_cast<float>(x);
}

template <class T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline __nv_fp8_e4m3 from_float<__nv_fp8_e4m3>(float x) {
  return __nv_fp8_e4m3(x);
}

// Over the 32 lanes; every lane gets the result.
__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

__device__ inline float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
  return x;
}

__device__ inline float warp_min(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fminf(x, __shfl_xor_sync(~0u, x, offset));
  return x;
}

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Calls `launch` with a value of the type that is named; takes fp32 and bf16.
template <class Launch>
cudaError_t launch_typed(Type type, Launch const& launch) {
  switch (type) {
    case Type::kFloat32:
      return launch(float{});
    case Type::kBfloat16:
      return launch(__nv_bfloat16{});
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace m3::kernels
