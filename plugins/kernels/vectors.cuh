#pragma once

#include "kernels/numeric.cuh"

// Four neighbouring elements at once: one load or store of 16 (fp32), 8 (bf16) or 4 (e4m3) bytes.
// Pointers are aligned to four elements.
namespace m3::kernels {

__device__ inline float4 load4(float const* p) {
  return *reinterpret_cast<float4 const*>(p);
}

__device__ inline float4 load4(__nv_bfloat16 const* p) {
  uint2 const bits = *reinterpret_cast<uint2 const*>(p);
  // A bf16 is the upper half of an fp32; the lower address holds the lower half-word.
  return make_float4(__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xffff0000u),
                     __uint_as_float(bits.y << 16), __uint_as_float(bits.y & 0xffff0000u));
}

__device__ inline float4 load4(__nv_fp8_e4m3 const* p) {
  return static_cast<float4>(*reinterpret_cast<__nv_fp8x4_e4m3 const*>(p));
}

template <class T>
struct alignas(4 * sizeof(T)) Four {
  T x, y, z, w;
};

template <class T>
__device__ inline void store4(T* p, float4 v) {
  *reinterpret_cast<Four<T>*>(p) = {from_float<T>(v.x), from_float<T>(v.y), from_float<T>(v.z),
                                    from_float<T>(v.w)};
}

__device__ inline float4 operator*(float4 v, float s) {
  return make_float4(v.x * s, v.y * s, v.z * s, v.w * s);
}

__device__ inline float4 operator/(float4 v, float s) {
  return make_float4(v.x / s, v.y / s, v.z / s, v.w / s);
}

// acc + a . b
__device__ inline float dot4(float4 a, float4 b, float acc) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, acc))));
}

// acc += v * s
__device__ inline void axpy4(float4& acc, float4 v, float s) {
  acc = make_float4(fmaf(v.x, s, acc.x), fmaf(v.y, s, acc.y), fmaf(v.z, s, acc.z),
                    fmaf(v.w, s, acc.w));
}

}  // namespace m3::kernels
