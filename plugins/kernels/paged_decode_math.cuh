#pragma once

#include <cuda_fp8.h>

#include "kernels/mma_sync.cuh"
#include "kernels/packed_tokens.h"

// The products of the decode kernel for one warp: 16 query rows with a few keys in shared memory,
// for each type of cache.
namespace m3::kernels::paged_decode {

using Bf16 = __nv_bfloat16;
using E4m3 = __nv_fp8_e4m3;

// Byte offset of 16-byte chunk `chunk` of a key in a slice of `rows` keys: columns of 128 bytes, in
// which an exclusive or spreads the eight keys of a matrix over all banks.
__device__ inline uint32_t key_chunk(int rows, int key, int chunk) {
  return chunk / 8 * rows * 128 + swizzled<8>(key, chunk % 8);
}

// Query rows of a warp as fragments of products over 16 channels. An e4m3 cache takes fp16
// products: the rows are then scaled by a power of two, which `scale` takes back.
struct Queries {
  uint32_t fragment[kHeadSize / 16][4];
  float scale[2];  // of rows lane / 4 and lane / 4 + 8
};

template <class Cache>
struct Products;

template <>
struct Products<Bf16> {
  static constexpr int KEYS = 16;                    // that a warp takes at once
  static constexpr int CHUNKS = kHeadSize * 2 / 16;  // 16-byte chunks of a key
  static constexpr float WEIGHT_SHIFT = 0.f;

  // `rows` are 16 in shared memory, swizzled.
  __device__ static void load(Queries& q, uint32_t rows) {
    int const lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < kHeadSize / 16; ++step) {
      load_matrices(q.fragment[step], rows + swizzled<16>(lane % 16, 2 * step + lane / 16));
    }
    q.scale[0] = q.scale[1] = 1.f;
  }

  // `keys` and `values`: KEYS of a slice of `rows`.
  __device__ static void score(float (&s)[KEYS / 8][4], Queries const& q, uint32_t keys, int rows) {
    int const lane = threadIdx.x % 32;
    int const key = lane % 8 + lane / 16 * 8;
    float odd[KEYS / 8][4] = {};  // two shorter chains of products
#pragma unroll
    for (int step = 0; step < kHeadSize / 16; ++step) {
      uint32_t b[4];
      load_matrices(b, keys + key_chunk(rows, key, 2 * step + lane / 8 % 2));
      multiply_add(step % 2 == 0 ? s[0] : odd[0], q.fragment[step], b[0], b[1]);
      multiply_add(step % 2 == 0 ? s[1] : odd[1], q.fragment[step], b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) s[i / 4][i % 4] += odd[i / 4][i % 4];
  }

  __device__ static uint32_t pack(float low, float high) { return pack_bf16(low, high); }

  __device__ static void sum(float (&out)[kHeadSize / 8][4], uint32_t const (&weights)[1][4],
                             uint32_t values, int rows) {
    int const lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kHeadSize / 16; ++n) {
      uint32_t b[4];
      load_matrices_transposed(b, values + key_chunk(rows, lane % 16, 2 * n + lane / 16));
      multiply_add(out[2 * n], weights[0], b[0], b[1]);
      multiply_add(out[2 * n + 1], weights[0], b[2], b[3]);
    }
  }

  // The lane's results of row h for 16 channels n: pairs at `channel` and `channel` + 8.
  __device__ static void store(float* row, int swizzle, int n, int h,
                               float const (&out)[kHeadSize / 8][4]) {
    int const channel = 16 * n + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<float2*>(row + ((channel + 8 * i) ^ swizzle)) =
          make_float2(out[2 * n + i][2 * h], out[2 * n + i][2 * h + 1]);
    }
  }
};

// Two neighbouring e4m3 values as fp16, exactly.
__device__ inline uint32_t widen(uint32_t pair) {
  __half2_raw const wide =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
  return reinterpret_cast<uint32_t const&>(wide);
}

// For a row of queries in fp16: a power of two that brings the largest value's exponent to 13, and
// its inverse.
__device__ inline float2 half_scale(float largest) {
  uint32_t const exponent = max(__float_as_uint(row_max(largest)) >> 23, 14u);
  return make_float2(__uint_as_float((267 - exponent) << 23),
                     __uint_as_float((exponent - 13) << 23));
}

// A product's channels and keys may come in any order: lane j of four has channels 4 j .. 4 j + 3
// of the queries and keys.
template <>
struct Products<E4m3> {
  static constexpr int KEYS = 32;
  static constexpr int CHUNKS = kHeadSize / 16;
  static constexpr float WEIGHT_SHIFT = 14.f;  // fp16 then keeps weights down to 2^-38

  __device__ static void load(Queries& q, uint32_t rows) {
    int const lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint2 bits[kHeadSize / 16];
      float largest = 0.f;
#pragma unroll
      for (int step = 0; step < kHeadSize / 16; ++step) {
        uint32_t const chunk = swizzled<16>(lane / 4 + 8 * h, 2 * step + lane % 4 / 2);
        bits[step] = load_8_bytes(rows + chunk + lane % 2 * 8);
#pragma unroll
        for (int i = 0; i < 4; ++i) largest = fmaxf(largest, fabsf(value(bits[step], i)));
      }
      float2 const scale = half_scale(largest);
      float const up = scale.x;
      q.scale[h] = scale.y;
#pragma unroll
      for (int step = 0; step < kHeadSize / 16; ++step) {
        q.fragment[step][h] = pack_half(value(bits[step], 0) * up, value(bits[step], 1) * up);
        q.fragment[step][2 + h] = pack_half(value(bits[step], 2) * up, value(bits[step], 3) * up);
      }
    }
  }

  __device__ static void score(float (&s)[KEYS / 8][4], Queries const& q, uint32_t keys, int rows) {
    int const lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < kHeadSize / 16; ++step) {
      uint32_t b[4];
      load_matrices(b, keys + key_chunk(rows, lane, step));
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        multiply_add_half(s[n], q.fragment[step], widen(b[n] & 0xffff), widen(b[n] >> 16));
      }
    }
  }

  __device__ static uint32_t pack(float low, float high) { return pack_half(low, high); }

  __device__ static void sum(float (&out)[kHeadSize / 8][4], uint32_t const (&weights)[2][4],
                             uint32_t values, int rows) {
    int const lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kHeadSize / 16; ++n) {
      uint32_t b[4];
      load_matrices_transposed(b, values + key_chunk(rows, lane, n));
      // Two channels of two keys: the even channel's keys first.
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] = __byte_perm(b[i], 0, 0x3120);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        multiply_add_half(out[2 * n], weights[k], widen(b[2 * k] & 0xffff),
                          widen(b[2 * k + 1] & 0xffff));
        multiply_add_half(out[2 * n + 1], weights[k], widen(b[2 * k] >> 16),
                          widen(b[2 * k + 1] >> 16));
      }
    }
  }

  __device__ static void store(float* row, int swizzle, int n, int h,
                               float const (&out)[kHeadSize / 8][4]) {
    int const channel = 16 * n + threadIdx.x % 4 * 4;
    *reinterpret_cast<float4*>(row + (channel ^ swizzle)) = make_float4(
        out[2 * n][2 * h], out[2 * n + 1][2 * h], out[2 * n][2 * h + 1], out[2 * n + 1][2 * h + 1]);
  }

 private:
  __device__ static uint2 load_8_bytes(uint32_t address) {
    uint2 bits;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];\n" : "=r"(bits.x), "=r"(bits.y) : "r"(address));
    return bits;
  }
  __device__ static float value(uint2 bits, int i) {
    uint32_t const pair = i < 2 ? bits.x : bits.y;
    return __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
  }
};

// The softmax of a warp's rows so far. Sums of weights are of the lane's keys alone.
struct State {
  float maximum[2];  // of the base-2 exponent
  float sum[2];
  float out[kHeadSize / 8][4];

  __device__ void clear() {
    maximum[0] = maximum[1] = -INFINITY;
    sum[0] = sum[1] = 0.f;
#pragma unroll
    for (int n = 0; n < kHeadSize / 8; ++n) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0.f;
  }
};

// Adds KEYS keys and values of a slice of `rows`. Row h of the lane sees the first `limit[h]` of
// them.
template <class Cache>
__device__ void attend(State& state, Queries const& q, float scale_log2, uint32_t keys,
                       uint32_t values, int rows, int32_t const (&limit)[2]) {
  using P = Products<Cache>;
  float s[P::KEYS / 8][4] = {};
  P::score(s, q, keys, rows);
  int const first_key = threadIdx.x % 4 * 2;
  bool const masked = min(limit[0], limit[1]) < P::KEYS;
  float maximum[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float const scale = scale_log2 * q.scale[h];
    float largest = -INFINITY;
#pragma unroll
    for (int n = 0; n < P::KEYS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = s[n][2 * h + i];
        x *= scale;
        if (masked && 8 * n + first_key + i >= limit[h]) x = -INFINITY;
        largest = fmaxf(largest, x);
      }
    }
    maximum[h] = fmaxf(state.maximum[h], row_max(largest));
  }
  if (__any_sync(~0u, maximum[0] > state.maximum[0] || maximum[1] > state.maximum[1])) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // With every score at -inf so far, -inf - -inf would be NaN.
      float const decay =
          maximum[h] == -INFINITY ? 0.f : exp2_flushed(state.maximum[h] - maximum[h]);
      state.maximum[h] = maximum[h];
      state.sum[h] *= decay;
#pragma unroll
      for (int n = 0; n < kHeadSize / 8; ++n) {
        state.out[n][2 * h] *= decay;
        state.out[n][2 * h + 1] *= decay;
      }
    }
  }
  uint32_t weights[P::KEYS / 16][4];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float const base = (maximum[h] == -INFINITY ? 0.f : maximum[h]) - P::WEIGHT_SHIFT;
#pragma unroll
    for (int n = 0; n < P::KEYS / 8; ++n) {
      float const low = exp2_flushed(s[n][2 * h] - base);
      float const high = exp2_flushed(s[n][2 * h + 1] - base);
      state.sum[h] += low + high;
      weights[n / 2][n % 2 * 2 + h] = P::pack(low, high);
    }
  }
  P::sum(state.out, weights, values, rows);
}

}  // namespace m3::kernels::paged_decode
