#pragma once

#include "kernels/numeric.cuh"

// 16 bytes of a row at once. Rows start at multiples of 16 bytes.
namespace m3::kernels {

template <class T>
struct Pack {
  static constexpr int SIZE = 16 / sizeof(T);
  uint4 bits;

  __device__ void unpack(float (&x)[SIZE]) const {
    uint32_t const words[] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        x[i] = __uint_as_float(words[i]);
      } else {  // a bf16 is the upper half of an fp32
        x[2 * i] = __uint_as_float(words[i] << 16);
        x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
      }
    }
  }

  // Rounds to nearest even.
  __device__ static Pack of(float const (&x)[SIZE]) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        words[i] = __float_as_uint(x[i]);
      } else {
        __nv_bfloat162 const pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
        words[i] = *reinterpret_cast<uint32_t const*>(&pair);
      }
    }
    return {make_uint4(words[0], words[1], words[2], words[3])};
  }

  __device__ void store(T* row, int pack) const { reinterpret_cast<uint4*>(row)[pack] = bits; }
};

// Of memory that this kernel reads once: leaves the L1 cache to others.
template <class T>
__device__ inline Pack<T> load_once(T const* row, int pack) {
  uint4 bits;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "l"(reinterpret_cast<uint4 const*>(row) + pack));
  return {bits};
}

// `kSize` floats, a multiple of four, from a multiple of 16 bytes.
template <int kSize>
__device__ inline void load_floats(float const* from, float (&x)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize / 4; ++i) {
    float4 const four = __ldg(reinterpret_cast<float4 const*>(from) + i);
    x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
  }
}

}  // namespace m3::kernels
