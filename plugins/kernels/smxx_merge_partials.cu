#include <cuda_bf16.h>

#include "kernels/mma_sync.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/smxx_merge_partials.h"

namespace m3::kernels {
namespace {

constexpr int WARPS = 4;      // of a thread block: a quarter of a unit's channels each
constexpr int PARTIALS = 16;  // that a lane loads before it adds the first

// Zeros when not `valid`, without a branch, so that all loads are under way at once.
__device__ uint4 load_once(uint4 const* p, bool valid) {
  uint4 x;
  asm volatile(
      "{\n.reg .pred valid;\nsetp.ne.b32 valid, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@valid ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
      : "l"(p), "r"(static_cast<int>(valid)));
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

// Grid: (tokens, KV heads, units). Lane l has the base-2 logarithms of head l / 4 for places l % 4
// and every fourth one behind it. kRounds: of 16 places.
template <int kRounds>
__global__ void __launch_bounds__(32 * WARPS, 5) merge_kernel(MergeParams const p) {
  wait_for_previous_kernel();
  int const quarter = threadIdx.x / 32, lane = threadIdx.x % 32;
  int const unit = blockIdx.z, units = gridDim.z;
  int64_t const row = int64_t{blockIdx.y} * p.num_tokens + blockIdx.x;
  int32_t const token = p.first_token + static_cast<int32_t>(blockIdx.x);
  int32_t const num_real = p.tokens.cu_query_lens[p.num_requests];
  float const* const lse = p.lse + row * p.top_k * p.group + unit * kUnitHeads + lane / 4;
  constexpr int PER_ROUND = PARTIALS / 4;
  float weight[kRounds * PER_ROUND];
#pragma unroll
  for (int i = 0; i < kRounds * PER_ROUND; ++i) {
    int const place = lane % 4 + 4 * i;
    weight[i] = place < p.top_k ? lse[place * p.group] : -INFINITY;
  }
  float largest = -INFINITY, total = 0.f;
#pragma unroll
  for (float const x : weight) largest = fmaxf(largest, x);
  largest = row_max(largest);
  if (token < num_real && largest == INFINITY) return;  // all heads of a row alike
#pragma unroll
  for (float& x : weight) {
    x = token < num_real && x > -INFINITY ? exp2f(x - largest) : 0.f;
    total += x;
  }
  total = row_sum(total);

  float sum[8] = {};
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    auto const* const partials =
        static_cast<uint4 const*>(p.partials) +
        ((row * p.top_k + round * PARTIALS) * units + unit) * (kUnitBytes / 16) + quarter * 32 +
        lane;
    uint4 loaded[PARTIALS];
    float weights[PARTIALS];
#pragma unroll
    for (int i = 0; i < PARTIALS; ++i) {
      weights[i] = __shfl_sync(~0u, weight[round * PER_ROUND + i / 4], i % 4, 4);
      loaded[i] = load_once(partials + i * units * (kUnitBytes / 16), weights[i] > 0.f);
    }
#pragma unroll
    for (int i = 0; i < PARTIALS; ++i) {
      add_pair(sum[0], sum[1], loaded[i].x, weights[i]);
      add_pair(sum[2], sum[3], loaded[i].y, weights[i]);
      add_pair(sum[4], sum[5], loaded[i].z, weights[i]);
      add_pair(sum[6], sum[7], loaded[i].w, weights[i]);
    }
  }
  float const factor = total > 0.f ? 1.f / total : 0.f;
  uint32_t packed[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    packed[i] = pack_bf16(sum[2 * i] * factor, sum[2 * i + 1] * factor);
  }
  int64_t const head = int64_t{token} * p.num_heads +
                       (p.first_kv_head + static_cast<int>(blockIdx.y)) * p.group +
                       unit * kUnitHeads + lane / 4;
  auto* const out = static_cast<__nv_bfloat16*>(p.out) + head * kHeadSize;
  *reinterpret_cast<uint4*>(out + quarter * 32 + lane % 4 * 8) = transpose_quad(packed);
}

}  // namespace

cudaError_t launch_merge_partials(MergeParams const& p, cudaStream_t stream) {
  if (p.num_tokens == 0) return cudaSuccess;
  if (p.top_k > 2 * PARTIALS) return cudaErrorInvalidValue;
  dim3 const grid(p.num_tokens, p.num_kv_heads, p.group / kUnitHeads);
  return launch_behind(p.top_k <= PARTIALS ? merge_kernel<1> : merge_kernel<2>, grid, 32 * WARPS, 0,
                       stream, p);
}

}  // namespace m3::kernels
