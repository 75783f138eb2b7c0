#include "kernels/numeric.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/sm90_moe_math.cuh"
#include "kernels/sm90_moe_stages.h"
#include "kernels/sm90_ptx.cuh"
#include "kernels/sm90_wgmma.cuh"
#include "kernels/tensor_map.h"

// The router's partial logits in steps of many tokens: two warpgroups multiply 64 tokens each by
// 128 experts. The third brings the weights, cut into three bf16 parts, and starts the copies of x.
namespace m3::kernels {
namespace {

constexpr int TOKENS = 128;   // of a block
constexpr int EXPERTS = 128;  // of a block
constexpr int COLUMNS = 64;   // of a stage
constexpr int PARTS = 3;
constexpr int STAGES = 3;
constexpr int THREADS = 384;
constexpr int LOADERS = 128;
constexpr int X_BYTES = TOKENS * COLUMNS * 2;
constexpr int PART_BYTES = EXPERTS * COLUMNS * 2;
constexpr int STAGE_BYTES = X_BYTES + PARTS * PART_BYTES;

struct Barriers {
  uint64_t full[STAGES];
  uint64_t empty[STAGES];
};

constexpr int SHARED_BYTES = 1024 + STAGES * STAGE_BYTES + static_cast<int>(sizeof(Barriers));

// A thread's share of a stage's weights: eight neighbouring columns of every 16th expert.
struct Weights {
  static constexpr int EACH = EXPERTS / (LOADERS / 8);
  float4 values[EACH][2];

  __device__ void load(MoeParams const& p, int expert0, int64_t column) {
    int const chunk = static_cast<int>(threadIdx.x) % 8;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      int const expert = expert0 + static_cast<int>(threadIdx.x) / 8 + i * (LOADERS / 8);
      auto const* from = reinterpret_cast<float4 const*>(
          p.router_weight + min(expert, p.experts - 1) * p.hidden + column + chunk * 8);
      values[i][0] = __ldg(from);
      values[i][1] = __ldg(from + 1);
    }
  }

  // In TMA's swizzle
  __device__ void store(char* parts) const {
    int const chunk = static_cast<int>(threadIdx.x) % 8;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      int const row = static_cast<int>(threadIdx.x) / 8 + i * (LOADERS / 8);
      float4 const& a = values[i][0];
      float4 const& b = values[i][1];
      uint32_t v[4][PARTS];
      split_bf16(a.x, a.y, v[0]);
      split_bf16(a.z, a.w, v[1]);
      split_bf16(b.x, b.y, v[2]);
      split_bf16(b.z, b.w, v[3]);
      char* to = parts + row * 128 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
      for (int j = 0; j < PARTS; ++j) {
        *reinterpret_cast<uint4*>(to + j * PART_BYTES) =
            make_uint4(v[0][j], v[1][j], v[2][j], v[3][j]);
      }
    }
  }
};

__global__ void __launch_bounds__(THREADS, 1)
    sm90_moe_long_logits(__grid_constant__ CUtensorMap const x, MoeParams p, int split_stages,
                         float* __restrict__ logits) {
  extern __shared__ char dynamic[];
  uint32_t const base = ptx::shared_address(dynamic);
  uint32_t const aligned = (base + 1023) / 1024 * 1024;
  char* stages = dynamic + (aligned - base);
  auto& barriers = *reinterpret_cast<Barriers*>(stages + STAGES * STAGE_BYTES);
  let_next_kernel_start();
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      ptx::barrier_init(ptx::shared_address(&barriers.full[i]), 1 + LOADERS);
      ptx::barrier_init(ptx::shared_address(&barriers.empty[i]), (THREADS - LOADERS) / 32);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();  // barriers
  int const token0 = static_cast<int>(blockIdx.x) * TOKENS;
  int const expert0 = static_cast<int>(blockIdx.z) * EXPERTS;
  int const begin = static_cast<int>(blockIdx.y) * split_stages;
  int const end = min(begin + split_stages, static_cast<int>(p.hidden / COLUMNS));

  if (threadIdx.x < LOADERS) {
    uint64_t const policy = ptx::policy_evict_normal();
    Weights weights;
    if (begin < end) weights.load(p, expert0, int64_t{begin} * COLUMNS);
    for (int k = begin; k < end; ++k) {
      int const stage = (k - begin) % STAGES;
      uint32_t const full = ptx::shared_address(&barriers.full[stage]);
      ptx::barrier_wait(ptx::shared_address(&barriers.empty[stage]), (k - begin) / STAGES % 2 ^ 1);
      if (threadIdx.x == 0) {
        ptx::barrier_expect(full, X_BYTES);
        ptx::tma_load(aligned + stage * STAGE_BYTES, &x, full, k * COLUMNS, token0, policy);
      }
      weights.store(stages + stage * STAGE_BYTES + X_BYTES);
      if (k + 1 < end) weights.load(p, expert0, int64_t{k + 1} * COLUMNS);
      ptx::fence_async_proxy();
      ptx::barrier_arrive(full);
    }
    return;
  }

  int const lane = static_cast<int>(threadIdx.x) % 32;
  int const group = static_cast<int>(threadIdx.x) / 128 - 1;
  float sums[EXPERTS / 2] = {};
  for (int k = begin; k < end; ++k) {
    int const stage = (k - begin) % STAGES;
    ptx::barrier_wait(ptx::shared_address(&barriers.full[stage]), (k - begin) / STAGES % 2);
    uint32_t const at = aligned + stage * STAGE_BYTES;
    uint64_t const a = wgmma::descriptor(at + group * X_BYTES / 2);
    float part[EXPERTS / 2] = {};  // short sums: the tensor cores truncate
    wgmma::fence();
#pragma unroll
    for (int j = 0; j < PARTS; ++j) {
      uint64_t const b = wgmma::descriptor(at + X_BYTES + j * PART_BYTES);
#pragma unroll
      for (int i = 0; i < COLUMNS / 16; ++i) wgmma::mma<EXPERTS>(part, a + 2 * i, b + 2 * i);
    }
    wgmma::commit();
    wgmma::wait<0>();
    if (lane == 0) ptx::barrier_arrive(ptx::shared_address(&barriers.empty[stage]));
#pragma unroll
    for (int i = 0; i < EXPERTS / 2; ++i) sums[i] += part[i];
  }

  int const warp = static_cast<int>(threadIdx.x) / 32 % 4;
#pragma unroll
  for (int i = 0; i < EXPERTS / 2; ++i) {
    int const token = token0 + group * 64 + warp * 16 + lane / 4 + i / 2 % 2 * 8;
    int const expert = expert0 + i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (token < p.tokens && expert < p.experts) {
      logits[(blockIdx.y * p.tokens + token) * p.experts + expert] = sums[i];
    }
  }
}

}  // namespace

cudaError_t launch_sm90_moe_long_logits(MoeParams const& p, float* logits, cudaStream_t stream) {
  cuuint64_t const dims[] = {static_cast<cuuint64_t>(p.hidden), static_cast<cuuint64_t>(p.tokens)};
  cuuint32_t const box[] = {COLUMNS, TOKENS};
  CUtensorMap x{};
  cudaError_t status = encode_tensor_map(x, p.x, 2, dims, box);
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(sm90_moe_long_logits, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                SHARED_BYTES);
  if (status != cudaSuccess) return status;
  int const splits = sm90_router_splits(p.tokens, p.hidden);
  dim3 const grid(static_cast<unsigned>(ceil_div(p.tokens, TOKENS)), splits,
                  static_cast<unsigned>(ceil_div(p.experts, EXPERTS)));
  int const split_stages = static_cast<int>(ceil_div(p.hidden / COLUMNS, splits));
  sm90_moe_long_logits<<<grid, THREADS, SHARED_BYTES, stream>>>(x, p, split_stages, logits);
  return cudaGetLastError();
}

}  // namespace m3::kernels
