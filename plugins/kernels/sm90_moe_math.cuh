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

// Four neighbouring sums on their way to combine, 64 bits: 14 of each sum, in steps of 2^-12 of the
// largest one's power of two, and its exponent. An error of at most 2^-13 of the largest, where
// the result's rounding errs by 2^-9 of each. NaN and infinity make all four NaN.
struct MoeFour {
  static constexpr float HALFWAY = 12582912.0f;  // 1.5 * 2^23: added, the integer's bits come last
  static constexpr uint32_t FIELD = 0x3fff;
  uint2 bits;

  __device__ static MoeFour pack(float4 const& v) {
    uint32_t const largest =
        max(max(magnitude(v.x), magnitude(v.y)), max(magnitude(v.z), magnitude(v.w)));
    uint32_t const exponent = max(largest >> 23, 13u);
    float const scale = __uint_as_float((266 - exponent) << 23);  // 2^12 / 2^(exponent - 127)
    uint32_t const x = integer(v.x * scale), y = integer(v.y * scale);
    uint32_t const z = integer(v.z * scale), w = integer(v.w * scale);
    return {make_uint2((x & FIELD) | (y & FIELD) << 14 | z << 28,
                       (z & FIELD) >> 4 | (w & FIELD) << 10 | exponent << 24)};
  }
  // sum += weight * these
  __device__ void add_to(float4& sum, float weight) const {
    uint32_t const exponent = bits.y >> 24;
    float const step = __uint_as_float(exponent == 255 ? 0x7fc00000 : (exponent - 12) << 23);
    float const factor = weight * step;
    sum.x = fmaf(factor, value(bits.x), sum.x);
    sum.y = fmaf(factor, value(bits.x >> 14), sum.y);
    sum.z = fmaf(factor, value(__funnelshift_r(bits.x, bits.y, 28)), sum.z);
    sum.w = fmaf(factor, value(bits.y >> 10), sum.w);
  }
  __device__ void store(void* t) const { __stcs(static_cast<uint2*>(t), bits); }
  __device__ static MoeFour load(void const* t) { return {__ldcs(static_cast<uint2 const*>(t))}; }

 private:
  __device__ static uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffff; }
  __device__ static uint32_t integer(float x) {
    return __float_as_uint(fminf(x, 8191.0f) + HALFWAY);
  }
  // Of the lower 14 bits
  __device__ static float value(uint32_t field) {
    return __uint_as_float((field & FIELD) ^ 0x4b002000) - 8396800.0f;  // 2^23 + 2^13
  }
};

}  // namespace m3::kernels
