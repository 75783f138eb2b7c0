#include <cuda_bf16.h>

#include "kernels/mma_sync.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/smxx_merge_partials.h"

namespace m3::kernels {
namespace {

constexpr int THREADS = 256;
constexpr int QUARTERS = 4;  // of a unit: a warp each
constexpr int BATCH = 16;    // partials that a lane loads before it adds the first

__device__ uint4 load_once(uint4 const* p) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(p));
  return x;
}

__device__ void add_pair(float& a, float& b, uint32_t bits, float weight) {
  a = fmaf(__uint_as_float(bits << 16), weight, a);
  b = fmaf(__uint_as_float(bits & 0xffff0000u), weight, b);
}

// The four lanes of a head exchange words, so that each has 16 neighbouring bytes.
__device__ uint4 transpose_quad(uint32_t const (&x)[4]) {
  int const c = threadIdx.x % 4;
  uint32_t y[4];
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    // Lane c sends what lane c ^ step is to have, and gets that lane's word for itself.
    int const other = c ^ step;
    uint32_t const sent = other == 0 ? x[0] : other == 1 ? x[1] : other == 2 ? x[2] : x[3];
    uint32_t const got = __shfl_xor_sync(~0u, sent, step);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (other == i) y[i] = got;
    }
  }
  return make_uint4(y[0], y[1], y[2], y[3]);
}

// A warp: a quarter of the channels of eight heads of a token.
__global__ void __launch_bounds__(THREADS, 2) merge_kernel(MergeParams const p) {
  wait_for_previous_kernel();
  int const lane = threadIdx.x % 32;
  int const units = p.group / kUnitHeads;
  int64_t const warp = (int64_t{blockIdx.x} * THREADS + threadIdx.x) / 32;
  int const quarter = warp % QUARTERS;
  int const unit = warp / QUARTERS % units;
  int64_t const row = warp / (QUARTERS * units);  // head of the round * tokens + token
  if (row >= int64_t{p.num_kv_heads} * p.num_tokens) return;
  int32_t const token = p.first_token + static_cast<int32_t>(row % p.num_tokens);
  bool const real = token < p.tokens.cu_query_lens[p.num_requests];

  float sum[8] = {};
  if (real) {
    float const* const lse = p.lse + row * p.top_k * p.group + unit * kUnitHeads + lane / 4;
    float largest = -INFINITY;
    for (int s = lane % 4; s < p.top_k; s += 4) largest = fmaxf(largest, lse[s * p.group]);
    largest = row_max(largest);
    float total = 0.f;
    for (int first = 0; first < p.top_k; first += BATCH) {
      float weight[BATCH / 4];  // of every fourth place
#pragma unroll
      for (int i = 0; i < BATCH / 4; ++i) {
        int const s = first + lane % 4 + 4 * i;
        float const x = s < p.top_k ? lse[s * p.group] : -INFINITY;
        weight[i] = x == -INFINITY ? 0.f : exp2f(x - largest);
        total += weight[i];
      }
      auto const* const partials = static_cast<uint4 const*>(p.partials) +
                                   ((row * p.top_k + first) * units + unit) * (kUnitBytes / 16) +
                                   quarter * 32 + lane;
      uint4 loaded[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        // A warp's heads have a partial at a place all or none, up to underflow.
        bool const some = __any_sync(~0u, lane % 4 == i % 4 && weight[i / 4] > 0.f);
        loaded[i] = make_uint4(0, 0, 0, 0);
        if (some) loaded[i] = load_once(partials + i * units * (kUnitBytes / 16));
      }
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        float const w = __shfl_sync(~0u, weight[i / 4], i % 4, 4);
        add_pair(sum[0], sum[1], loaded[i].x, w);
        add_pair(sum[2], sum[3], loaded[i].y, w);
        add_pair(sum[4], sum[5], loaded[i].z, w);
        add_pair(sum[6], sum[7], loaded[i].w, w);
      }
    }
    total = row_sum(total);
    float const factor = total > 0.f ? 1.f / total : 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] *= factor;
  }
  uint32_t packed[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) packed[i] = pack_bf16(sum[2 * i], sum[2 * i + 1]);
  int64_t const head = int64_t{token} * p.num_heads +
                       (p.first_kv_head + row / p.num_tokens) * p.group + unit * kUnitHeads +
                       lane / 4;
  auto* const out = static_cast<__nv_bfloat16*>(p.out) + head * kHeadSize;
  *reinterpret_cast<uint4*>(out + quarter * 32 + lane % 4 * 8) = transpose_quad(packed);
}

}  // namespace

cudaError_t launch_merge_partials(MergeParams const& p, cudaStream_t stream) {
  int64_t const warps = int64_t{p.num_tokens} * p.num_kv_heads * (p.group / kUnitHeads) * QUARTERS;
  if (warps == 0) return cudaSuccess;
  auto const grid = static_cast<uint32_t>((warps * 32 + THREADS - 1) / THREADS);
  return launch_behind(merge_kernel, grid, THREADS, 0, stream, p);
}

}  // namespace m3::kernels
