#include <cmath>

#include "kernels/numeric.cuh"
#include "kernels/smxx_varlen_attention.h"

namespace m3::kernels {
namespace {

constexpr int QUERIES = 32;  // a block
constexpr int KEYS = 32;     // a step
constexpr int LANES = 4;     // threads that share a query, neighbours in a warp
constexpr int THREADS = QUERIES * LANES;
constexpr int D = kMaxVarlenHeadSize;
constexpr int LD = D + 1;  // odd: no bank conflicts down a column

struct Segment {
  int64_t begin, end;
};

// The segment with cu[s] <= row < cu[s + 1]; empty when there is none.
__device__ Segment find_segment(int32_t const* cu, int32_t segments, int64_t row) {
  int low = 0;
  int high = segments + 1;
  while (low < high) {  // first entry greater than row
    int const middle = (low + high) / 2;
    if (cu[middle] > row) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  if (low == 0 || low > segments) return {0, 0};
  return {cu[low - 1], cu[low]};
}

// Sums and maxima over the LANES threads of a query.
__device__ float lanes_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ float lanes_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Rows first.. of one head as fp32; zeros at or beyond `end`.
template <class T>
__device__ void load_rows(float (*rows)[LD], T const* tensor, int64_t first, int64_t end,
                          int64_t row_stride, int head_size) {
  for (int i = threadIdx.x; i < KEYS * head_size; i += THREADS) {
    int const row = i / head_size;
    int const d = i % head_size;
    bool const inside = first + row < end;
    rows[row][d] = inside ? to_float(tensor[(first + row) * row_stride + d]) : 0.0f;
  }
}

template <class T>
__global__ void __launch_bounds__(THREADS) varlen_attention(VarlenAttentionParams p) {
  static_assert(QUERIES == KEYS, "load_rows loads both");
  static_assert(LANES == 4, "lanes_max and lanes_sum reduce over four");
  __shared__ float queries[QUERIES][LD];
  __shared__ float keys[KEYS][LD];  // then the values of the same rows
  __shared__ float weights[QUERIES][KEYS + 1];
  __shared__ int64_t range[2];  // keys that any query of the block sees

  int64_t const first = int64_t{blockIdx.x} * QUERIES;
  int64_t const row_stride = int64_t{p.heads} * p.head_size;
  int64_t const head_offset = int64_t{blockIdx.y} * p.head_size;
  int const query = threadIdx.x / LANES;
  int const lane = threadIdx.x % LANES;
  int64_t const row = first + query;
  T const* k = static_cast<T const*>(p.k) + head_offset;
  T const* v = static_cast<T const*>(p.v) + head_offset;

  Segment segment{0, 0};
  if (row < p.rows) segment = find_segment(p.cu_seqlens, p.segments, row);
  segment.end = min(segment.end, p.rows);
  if (threadIdx.x == 0) {  // segments ascend, so the first and last real row bound the range
    int64_t const last = min(first + QUERIES, min(int64_t{p.cu_seqlens[p.segments]}, p.rows)) - 1;
    int64_t const begin = max(first, int64_t{p.cu_seqlens[0]});
    bool const any = begin <= last;
    range[0] = any ? find_segment(p.cu_seqlens, p.segments, begin).begin : 0;
    range[1] = any ? min(find_segment(p.cu_seqlens, p.segments, last).end, p.rows) : 0;
  }
  load_rows(queries, static_cast<T const*>(p.q) + head_offset, first, p.rows, row_stride,
            p.head_size);
  __syncthreads();  // queries, range

  float out[D / LANES] = {};  // channels lane, lane + 4, ..
  float maximum = -INFINITY;
  float sum = 0.0f;
  for (int64_t start = range[0]; start < range[1]; start += KEYS) {
    load_rows(keys, k, start, range[1], row_stride, p.head_size);
    __syncthreads();  // keys

    float scores[KEYS / LANES];
    float step_maximum = -INFINITY;
#pragma unroll
    for (int j = 0; j < KEYS / LANES; ++j) {
      int const key = lane + j * LANES;
      float score = 0.0f;
      for (int d = 0; d < p.head_size; ++d) score = fmaf(queries[query][d], keys[key][d], score);
      bool const visible = start + key >= segment.begin && start + key < segment.end;
      scores[j] = visible ? score * p.softmax_scale : -INFINITY;
      step_maximum = fmaxf(step_maximum, scores[j]);
    }
    float const new_maximum = fmaxf(maximum, lanes_max(step_maximum));
    bool const any = new_maximum != -INFINITY;  // else every exponent would be inf - inf
    float const correction = any ? expf(maximum - new_maximum) : 1.0f;
    float step_sum = 0.0f;
#pragma unroll
    for (int j = 0; j < KEYS / LANES; ++j) {
      float const weight = any ? expf(scores[j] - new_maximum) : 0.0f;
      weights[query][lane + j * LANES] = weight;
      step_sum += weight;
    }
    sum = sum * correction + lanes_sum(step_sum);
    maximum = new_maximum;
    __syncthreads();  // keys have been read, weights are written

    load_rows(keys, v, start, range[1], row_stride, p.head_size);
    __syncthreads();  // values
#pragma unroll
    for (int i = 0; i < D / LANES; ++i) {
      int const d = lane + i * LANES;
      if (d >= p.head_size) break;
      float value = out[i] * correction;
#pragma unroll 4  // in full it takes half a minute to compile
      for (int key = 0; key < KEYS; ++key) {
        float const weight = weights[query][key];
        // A masked row of another segment may hold NaN: weight 0 must not let it in.
        if (weight != 0.0f) value = fmaf(weight, keys[key][d], value);
      }
      out[i] = value;
    }
    __syncthreads();  // values and weights have been read before the next step overwrites them
  }

  if (row >= p.rows) return;
  T* target = static_cast<T*>(p.out) + row * row_stride + head_offset;
#pragma unroll
  for (int i = 0; i < D / LANES; ++i) {
    int const d = lane + i * LANES;
    if (d < p.head_size) target[d] = from_float<T>(sum > 0.0f ? out[i] / sum : 0.0f);
  }
}

}  // namespace

cudaError_t launch_varlen_attention(VarlenAttentionParams const& p, cudaStream_t stream) {
  if (p.rows == 0 || p.heads == 0 || p.head_size == 0) return cudaSuccess;
  if (p.head_size > kMaxVarlenHeadSize) return cudaErrorInvalidValue;
  dim3 const grid(static_cast<unsigned>(ceil_div(p.rows, QUERIES)), p.heads);
  return launch_typed(p.type, [&](auto t) {
    varlen_attention<decltype(t)><<<grid, THREADS, 0, stream>>>(p);
    return cudaGetLastError();
  });
}

}  // namespace m3::kernels
