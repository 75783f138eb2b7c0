#include "kernels/global_memory.cuh"
#include "kernels/numeric.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/sm90_moe_math.cuh"
#include "kernels/sm90_moe_stages.h"
#include "kernels/sm90_ptx.cuh"

namespace m3::kernels {
namespace {

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
constexpr int EXPERTS = 8;  // of a block, and of one instruction
constexpr int STEP = 32;    // columns of one warp's step
constexpr int STEPS = SM90_MOE_DECODE_HIDDEN / SM90_MOE_DECODE_SPLITS / (WARPS * STEP);

// Partial logits of all tokens and eight experts over one part of hidden; zeroes `ready`. The
// router's rows come while the previous kernel still runs. Lane l reads eight neighbouring columns
// of expert l / 4 and of token l / 4: the order of K is free.
__global__ void __launch_bounds__(THREADS)
    sm90_moe_decode_router(MoeParams p, float* __restrict__ logits, int32_t* __restrict__ ready) {
  __shared__ float2 sums[WARPS][32];
  let_next_kernel_start();
  int const lane = threadIdx.x % 32;
  int const warp = threadIdx.x / 32;
  auto const hidden = static_cast<int>(p.hidden);
  int const expert = min(static_cast<int>(blockIdx.x) * EXPERTS + lane / 4, p.experts - 1);
  int const token = lane / 4;
  int const column = static_cast<int>(blockIdx.y * STEPS * WARPS + warp) * STEP + lane % 4 * 8;
  float const* row = p.router_weight + int64_t{expert} * hidden + column;
  float4 weights[STEPS][2];
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    bool const inside = column + i * WARPS * STEP < hidden;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      auto const* from = reinterpret_cast<float4 const*>(row + i * WARPS * STEP) + half;
      weights[i][half] = inside ? __ldg(from) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
  if (blockIdx.x + blockIdx.y == 0) {
    // Every block of the next kernel reads these first
    if (threadIdx.x == 0) prefetch(p.real_tokens);
    if (static_cast<int>(threadIdx.x) * 32 < p.experts) prefetch(p.router_bias + threadIdx.x * 32);
  }
  wait_for_previous_kernel();
  if (blockIdx.x + blockIdx.y == 0) {
    for (int i = threadIdx.x; i < SM90_MOE_DECODE_VISITS; i += THREADS) ready[i] = 0;
  }
  auto const* x = static_cast<__nv_bfloat16 const*>(p.x) + int64_t{token} * hidden + column;
  uint4 values[STEPS];
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    bool const inside = token < p.tokens && column + i * WARPS * STEP < hidden;
    auto const* from = reinterpret_cast<uint4 const*>(x + i * WARPS * STEP);
    values[i] = inside ? __ldg(from) : make_uint4(0, 0, 0, 0);
  }

  float sum[2] = {};  // token lane / 4, experts 2 (lane % 4) and the next
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    float4 const(&w)[2] = weights[i];
    uint32_t parts[4][3];
    split_bf16(w[0].x, w[0].y, parts[0]);
    split_bf16(w[0].z, w[0].w, parts[1]);
    split_bf16(w[1].x, w[1].y, parts[2]);
    split_bf16(w[1].z, w[1].w, parts[3]);
    uint32_t const low[4] = {values[i].x, 0, values[i].y, 0};
    uint32_t const high[4] = {values[i].z, 0, values[i].w, 0};
    float part[4] = {};  // short sums: the tensor cores truncate
#pragma unroll
    for (int j = 0; j < 3; ++j) {
      ptx::mma_16x8x16(part, low, parts[0][j], parts[1][j]);
      ptx::mma_16x8x16(part, high, parts[2][j], parts[3][j]);
    }
    sum[0] += part[0];
    sum[1] += part[1];
  }
  sums[warp][lane] = make_float2(sum[0], sum[1]);
  __syncthreads();  // sums
  int const first = static_cast<int>(blockIdx.x) * EXPERTS + lane % 4 * 2;
  if (warp > 0 || token >= p.tokens) return;
  float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    total.x += sums[w][lane].x;
    total.y += sums[w][lane].y;
  }
  float* to = logits + (int64_t{blockIdx.y} * p.tokens + token) * p.experts + first;
  if (first < p.experts) to[0] = total.x;
  if (first + 1 < p.experts) to[1] = total.y;
}

}  // namespace

cudaError_t launch_sm90_moe_decode_router(MoeParams const& p, Sm90MoeWorkspace const& ws,
                                          cudaStream_t stream) {
  static_assert(SM90_MOE_DECODE_TOKENS <= 8, "all tokens are one operand");
  // The split of the multiprocessor that the next kernel needs, or its blocks could not come early
  cudaError_t const status =
      cudaFuncSetAttribute(sm90_moe_decode_router, cudaFuncAttributePreferredSharedMemoryCarveout,
                           cudaSharedmemCarveoutMaxShared);
  if (status != cudaSuccess) return status;
  dim3 const grid(static_cast<unsigned>(ceil_div(p.experts, EXPERTS)), SM90_MOE_DECODE_SPLITS);
  return launch_behind(sm90_moe_decode_router, grid, THREADS, 0, stream, p, ws.logits, ws.ready);
}

}  // namespace m3::kernels
