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

// Four neighbouring sums on their way to combine, 64 bits: 14 of each sum, in steps of about 2^-12
// of the largest one's power of two, and its exponent. An error of at most 2^-13 of the largest,
// where the result's rounding errs by 2^-9 of each. NaN and infinity make all four NaN.
struct MoeFour {
  // 2^23 + 2^13: an integer added to it comes last in the bits, below these.
  static constexpr float MIDDLE = 8396800.0f;
  static constexpr uint32_t ABOVE = 0x4b000000;
  static constexpr uint32_t FIELD = 0x3fff;
  uint2 bits;

  // In few instructions: a tile runs through those of all its sums once, so they come from afar.
  __device__ static MoeFour pack(float4 const& v) {
    float const most = larger(larger(v.x, v.y), larger(v.z, v.w));
    uint32_t const largest = max(__float_as_uint(most), 13u << 23);
    // 2^12 / 2^(exponent - 127), less by 2^-13 so that the largest fits even when it is rounded up.
    float const scale = __uint_as_float((265u << 23 | 0x7ff800) - (largest & 0x7f800000));
    uint32_t const x = integer(v.x, scale), y = integer(v.y, scale);
    uint32_t const z = integer(v.z, scale), w = integer(v.w, scale);
    return {make_uint2(x + (y << 14) + (z << 28),  // ABOVE too many
                       (z >> 4 & FIELD >> 4) | w << 10 | (largest << 1 & 0xff000000))};
  }
  // sum += weight * these
  __device__ void add_to(float4& sum, float weight) const {
    uint32_t const exponent = bits.y >> 24;
    uint32_t const step = (exponent - 12) << 23 | 1024;  // 1024: the scale's 1 / (1 - 2^-13)
    float const factor = weight * __uint_as_float(exponent == 255 ? 0x7fc00000 : step);
    uint32_t const low = bits.x - ABOVE;
    sum.x = fmaf(factor, value(low), sum.x);
    sum.y = fmaf(factor, value(low >> 14), sum.y);
    sum.z = fmaf(factor, value(__funnelshift_r(low, bits.y, 28)), sum.z);
    sum.w = fmaf(factor, value(bits.y >> 10), sum.w);
  }
  // If i < count. No branch, around which all of pack would have to go.
  __device__ void store_below(int i, int count, void* t) const {
    asm volatile(
        "{\n.reg .pred stored;\n"
        "setp.lt.s32 stored, %0, %1;\n"
        "@stored st.global.cs.v2.b32 [%2], {%3, %4};\n}\n" ::"r"(i),
        "r"(count), "l"(__cvta_generic_to_global(t)), "r"(bits.x), "r"(bits.y)
        : "memory");
  }
  // Eight neighbours
  __device__ static void load(MoeFour (&two)[2], void const* t) {
    uint4 const v = __ldcs(static_cast<uint4 const*>(t));
    two[0] = {make_uint2(v.x, v.y)};
    two[1] = {make_uint2(v.z, v.w)};
  }

 private:
  // Of the magnitudes; NaN if one is.
  __device__ static float larger(float x, float y) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(fabsf(x)), "f"(fabsf(y)));
    return result;
  }
  __device__ static uint32_t integer(float x, float scale) {
    return __float_as_uint(fmaf(x, scale, MIDDLE));
  }
  // Of the lower 14 bits
  __device__ static float value(uint32_t field) {
    return __uint_as_float((field & FIELD) | ABOVE) - MIDDLE;
  }
};

}  // namespace m3::kernels
