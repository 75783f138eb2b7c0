#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace m3::kernels {

// Three bf16 values whose sum is the fp32 one: 8 + 8 + 8 bits of mantissa. Their products with bf16
// are exact in fp32.
__device__ inline void split_bf16(float x, float y, uint32_t (&parts)[3]) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    __nv_bfloat162 const part = __floats2bfloat162_rn(x, y);
    parts[i] = reinterpret_cast<uint32_t const&>(part);
    x -= __low2float(part);
    y -= __high2float(part);
  }
}

// Unsigned order of floats; NaN lowest, and 0 stands for an expert that is taken.
__device__ inline uint32_t rank_of(float score) {
  if (isnan(score)) return 1;
  uint32_t const bits = __float_as_uint(score + 0.0f);  // -0 = 0
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ inline float clamped_swiglu(float gate, float up, float alpha, float limit) {
  gate = fminf(gate, limit);
  up = fminf(fmaxf(up, -limit), limit);
  return __fdividef(gate, 1.0f + __expf(-alpha * gate)) * (up + 1.0f);
}

}  // namespace m3::kernels
