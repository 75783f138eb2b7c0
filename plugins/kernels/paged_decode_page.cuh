#pragma once

#include "kernels/paged_decode_math.cuh"
#include "kernels/vectors.cuh"

// A page of keys and values against the 16 query rows of a KV head, by a block of eight warps:
// each takes the scores of 16 keys, and 16 channels of the sum over all keys.
namespace m3::kernels::paged_decode {

constexpr int PAGE_WARPS = 8;
constexpr int WARP_KEYS = kBlockSize / PAGE_WARPS;
constexpr int ROW_BYTES = kHeadSize * 2;  // of a query, and of the weights of a page's keys
static_assert(kBlockSize == kHeadSize && WARP_KEYS == 16 && kHeadSize / PAGE_WARPS == 16);

// Which 16-byte chunks of a key a lane multiplies, and so which channels of the queries: any order
// will do. In this one a quarter of a warp reads different banks.
__device__ inline int lane_chunk(int i) {
  return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
}

// Rows lane / 4 and lane / 4 + 8: pairs of channels in the order of the products.
struct QueryRows {
  uint32_t pairs[2][16];
  float scale[2];

  __device__ void fragment(int step, uint32_t (&a)[4]) const {
    a[0] = pairs[0][2 * step], a[1] = pairs[1][2 * step];
    a[2] = pairs[0][2 * step + 1], a[3] = pairs[1][2 * step + 1];
  }
};

__device__ inline uint4 load_chunk(uint8_t const* from) {
  return *reinterpret_cast<uint4 const*>(from);
}

__device__ inline float2 unpack_bf16(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

template <class Cache>
struct PageProducts;

template <>
struct PageProducts<Bf16> {
  static constexpr int CHUNKS = 4;  // of a key, a lane's
  __device__ static int query_chunk(int i) { return lane_chunk(i); }
  __device__ static void prepare(QueryRows& q) { q.scale[0] = q.scale[1] = 1.f; }

  __device__ static void score(float (&s)[4], QueryRows const& q, uint4 const (&keys)[CHUNKS]) {
    float odd[4] = {};  // two shorter chains of products
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      uint32_t a[4];
      q.fragment(2 * i, a);
      multiply_add(s, a, keys[i].x, keys[i].y);
      q.fragment(2 * i + 1, a);
      multiply_add(odd, a, keys[i].z, keys[i].w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] += odd[i];
  }

  __device__ static uint32_t pack(float low, float high) { return pack_bf16(low, high); }

  __device__ static void sum(float (&out)[2][4], uint32_t weights, uint32_t values) {
    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float odd[2][4] = {};
#pragma unroll
    for (int step = 0; step < PAGE_WARPS; ++step) {
      uint32_t a[4], b[4];
      load_matrices(a, weights + swizzled<16>(lane % 16, 2 * step + lane / 16));
      load_matrices_transposed(
          b, values + key_chunk(kBlockSize, 16 * step + lane % 16, 2 * warp + lane / 16));
      multiply_add(step % 2 == 0 ? out[0] : odd[0], a, b[0], b[1]);
      multiply_add(step % 2 == 0 ? out[1] : odd[1], a, b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i / 4][i % 4] += odd[i / 4][i % 4];
  }

  // Four channels of two rows: the lane's own pairs and those of its neighbour, so that four lanes
  // have sixteen channels of a row.
  template <class Emit>
  __device__ static void for_rows(float const (&out)[2][4], Emit const& emit) {
    int const lane = threadIdx.x % 32, odd = lane % 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float2 const first = make_float2(out[0][2 * h], out[0][2 * h + 1]);
      float2 const second = make_float2(out[1][2 * h], out[1][2 * h + 1]);
      float2 const kept = odd == 0 ? first : second;
      float2 other = odd == 0 ? second : first;
      other.x = __shfl_xor_sync(~0u, other.x, 1);
      other.y = __shfl_xor_sync(~0u, other.y, 1);
      float2 const low = odd == 0 ? kept : other, high = odd == 0 ? other : kept;
      emit(h, threadIdx.x / 32 * 16 + 8 * odd + lane % 4 / 2 * 4,
           make_float4(low.x, low.y, high.x, high.y));
    }
  }
};

template <>
struct PageProducts<E4m3> {
  static constexpr int CHUNKS = 2;
  __device__ static int query_chunk(int i) { return 2 * lane_chunk(i / 2) + i % 2; }

  __device__ static void prepare(QueryRows& q) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = 0.f;
#pragma unroll
      for (uint32_t const pair : q.pairs[h]) {
        float2 const x = unpack_bf16(pair);
        largest = fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y)));
      }
      float2 const scale = half_scale(largest);
      float const up = scale.x;
      q.scale[h] = scale.y;
#pragma unroll
      for (uint32_t& pair : q.pairs[h]) {
        float2 const x = unpack_bf16(pair);
        pair = pack_half(x.x * up, x.y * up);
      }
    }
  }

  __device__ static void score(float (&s)[4], QueryRows const& q, uint4 const (&keys)[CHUNKS]) {
    float odd[4] = {};
#pragma unroll
    for (int i = 0; i < 4 * CHUNKS; ++i) {
      uint4 const& chunk = keys[i / 4];
      uint32_t const word = i % 4 == 0   ? chunk.x
                            : i % 4 == 1 ? chunk.y
                            : i % 4 == 2 ? chunk.z
                                         : chunk.w;
      uint32_t a[4];
      q.fragment(i, a);
      multiply_add_half(i % 2 == 0 ? s : odd, a, widen(word & 0xffff), widen(word >> 16));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] += odd[i];
  }

  __device__ static uint32_t pack(float low, float high) { return pack_half(low, high); }

  __device__ static void sum(float (&out)[2][4], uint32_t weights, uint32_t values) {
    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float odd[2][4] = {};
#pragma unroll
    for (int step = 0; step < PAGE_WARPS / 2; ++step) {
      uint32_t b[4];
      load_matrices_transposed(b, values + key_chunk(kBlockSize, 32 * step + lane, warp));
      // Two channels of two keys: the even channel's keys first.
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] = __byte_perm(b[i], 0, 0x3120);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        uint32_t a[4];
        load_matrices(a, weights + swizzled<16>(lane % 16, 2 * (2 * step + k) + lane / 16));
        multiply_add_half(k == 0 ? out[0] : odd[0], a, widen(b[2 * k] & 0xffff),
                          widen(b[2 * k + 1] & 0xffff));
        multiply_add_half(k == 0 ? out[1] : odd[1], a, widen(b[2 * k] >> 16),
                          widen(b[2 * k + 1] >> 16));
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i / 4][i % 4] += odd[i / 4][i % 4];
  }

  template <class Emit>
  __device__ static void for_rows(float const (&out)[2][4], Emit const& emit) {
    int const channel = threadIdx.x / 32 * 16 + threadIdx.x % 4 * 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      emit(h, channel,
           make_float4(out[0][2 * h], out[1][2 * h], out[0][2 * h + 1], out[1][2 * h + 1]));
    }
  }
};

// From 16 rows in shared memory.
template <class Cache>
__device__ void load_queries(QueryRows& q, uint8_t const* rows) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint8_t const* const row = rows + (threadIdx.x % 32 / 4 + 8 * h) * ROW_BYTES;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint4 const x = load_chunk(row + PageProducts<Cache>::query_chunk(i) * 16);
      q.pairs[h][4 * i] = x.x, q.pairs[h][4 * i + 1] = x.y;
      q.pairs[h][4 * i + 2] = x.z, q.pairs[h][4 * i + 3] = x.w;
    }
  }
  PageProducts<Cache>::prepare(q);
}

// The products of the queries with the warp's keys: lane i's are those of rows i / 4 and i / 4 + 8
// with keys 8 n + 2 (i % 4) and the next.
template <class Cache>
__device__ void score_keys(float (&s)[2][4], QueryRows const& q, uint8_t const* keys) {
  using P = PageProducts<Cache>;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    int const key = threadIdx.x / 32 * WARP_KEYS + 8 * n + threadIdx.x % 32 / 4;
    uint4 chunks[P::CHUNKS];
#pragma unroll
    for (int i = 0; i < P::CHUNKS; ++i) {
      chunks[i] = load_chunk(keys + key_chunk(kBlockSize, key, lane_chunk(i)));
    }
    P::score(s[n], q, chunks);
  }
}

// Computes an address here, not where it is used: there everyone waits for it.
template <class T>
__device__ void compute_now(T const*& address) {
  asm volatile("" : "+l"(address));
}

// One number of each warp and row.
struct alignas(16) WarpRows {
  float x[kMaxGroup][PAGE_WARPS];

  __device__ float largest(int row) const {
    float4 const a = load4(x[row]), b = load4(x[row] + 4);
    return fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
  }
  __device__ float sum(int row) const {
    float4 const a = load4(x[row]), b = load4(x[row] + 4);
    return ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
  }
};

}  // namespace m3::kernels::paged_decode
