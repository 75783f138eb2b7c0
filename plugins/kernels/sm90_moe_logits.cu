#include "kernels/cluster.cuh"
#include "kernels/numeric.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/sm90_moe_math.cuh"
#include "kernels/sm90_moe_stages.h"
#include "kernels/sm90_ptx.cuh"
#include "kernels/sm90_wgmma.cuh"
#include "kernels/tensor_map.h"

// The router's partial logits in steps of many tokens: two warpgroups multiply 64 tokens each by
// 128 experts. Clusters of two blocks share the weights, which a kernel before has cut into three
// bf16 parts.
namespace m3::kernels {
namespace {

constexpr int TOKENS = 128;   // of a block
constexpr int EXPERTS = 128;  // of a block
constexpr int COLUMNS = 64;   // of a stage
constexpr int PARTS = 3;
constexpr int SHARERS = 2;
constexpr int STAGES = 3;
constexpr int THREADS = 384;
constexpr int X_BYTES = TOKENS * COLUMNS * 2;
constexpr int PART_BYTES = EXPERTS * COLUMNS * 2;
constexpr int STAGE_BYTES = X_BYTES + PARTS * PART_BYTES;
constexpr int CUT_THREADS = 256;

struct Barriers {
  uint64_t full[STAGES];
  uint64_t empty[STAGES];
};

constexpr int SHARED_BYTES = 1024 + STAGES * STAGE_BYTES + static_cast<int>(sizeof(Barriers));

// parts[i] of four weights: bf16 [3, experts, hidden]
__global__ void __launch_bounds__(CUT_THREADS)
    sm90_moe_cut_router(float4 const* __restrict__ weights, uint2* __restrict__ parts,
                        int64_t fours) {
  let_next_kernel_start();
  int64_t const i = int64_t{blockIdx.x} * CUT_THREADS + threadIdx.x;
  if (i >= fours) return;
  float4 const w = __ldg(weights + i);
  uint32_t low[PARTS], high[PARTS];
  split_bf16(w.x, w.y, low);
  split_bf16(w.z, w.w, high);
#pragma unroll
  for (int j = 0; j < PARTS; ++j) parts[j * fours + i] = make_uint2(low[j], high[j]);
}

__global__ void __launch_bounds__(THREADS, 1)
    sm90_moe_long_logits(__grid_constant__ CUtensorMap const x,
                         __grid_constant__ CUtensorMap const weights, int64_t tokens, int experts,
                         int all_stages, int split_stages, float* __restrict__ logits) {
  extern __shared__ char dynamic[];
  uint32_t const base = ptx::shared_address(dynamic);
  uint32_t const aligned = (base + 1023) / 1024 * 1024;
  auto& barriers = *reinterpret_cast<Barriers*>(dynamic + (aligned - base) + STAGES * STAGE_BYTES);
  int const sharer = cluster_rank();
  let_next_kernel_start();
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      ptx::barrier_init(ptx::shared_address(&barriers.full[i]), 1);
      ptx::barrier_init(ptx::shared_address(&barriers.empty[i]), (THREADS / 32 - 4) * SHARERS);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();  // barriers
  meet_cluster();   // those of the other block
  int const token0 = static_cast<int>(blockIdx.x) * TOKENS;
  int const expert0 = static_cast<int>(blockIdx.z) * EXPERTS;
  int const begin = static_cast<int>(blockIdx.y) * split_stages;
  int const end = min(begin + split_stages, all_stages);
  int const lane = static_cast<int>(threadIdx.x) % 32;

  if (threadIdx.x < 128) {
    if (threadIdx.x == 0) {
      uint64_t const policy = ptx::policy_evict_normal();
      wait_for_previous_kernel();
      for (int k = begin; k < end; ++k) {
        int const stage = (k - begin) % STAGES;
        uint32_t const full = ptx::shared_address(&barriers.full[stage]);
        ptx::barrier_wait(ptx::shared_address(&barriers.empty[stage]),
                          (k - begin) / STAGES % 2 ^ 1);
        ptx::barrier_expect(full, STAGE_BYTES);
        uint32_t const at = aligned + stage * STAGE_BYTES;
        ptx::tma_load(at, &x, full, k * COLUMNS, token0, policy);
        for (int j = 0; j < PARTS; ++j) {
          uint32_t const to = at + X_BYTES + j * PART_BYTES + sharer * (PART_BYTES / SHARERS);
          ptx::tma_load_multicast(to, &weights, full, k * COLUMNS,
                                  j * experts + expert0 + sharer * (EXPERTS / SHARERS),
                                  (1 << SHARERS) - 1, policy);
        }
      }
    }
  } else {
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
      if (lane < SHARERS) {
        ptx::barrier_arrive_at(ptx::shared_address(&barriers.empty[stage]), lane);
      }
#pragma unroll
      for (int i = 0; i < EXPERTS / 2; ++i) sums[i] += part[i];
    }

    wait_for_previous_kernel();
    int const warp = static_cast<int>(threadIdx.x) / 32 % 4;
#pragma unroll
    for (int i = 0; i < EXPERTS / 2; ++i) {
      int const token = token0 + group * 64 + warp * 16 + lane / 4 + i / 2 % 2 * 8;
      int const expert = expert0 + i / 4 * 8 + lane % 4 * 2 + i % 2;
      if (token < tokens && expert < experts) {
        logits[(blockIdx.y * tokens + token) * experts + expert] = sums[i];
      }
    }
  }
  __syncwarp();
  meet_cluster();  // a block that is gone cannot be written to
}

}  // namespace

cudaError_t launch_sm90_moe_long_logits(MoeParams const& p, Sm90MoeWorkspace const& ws,
                                        cudaStream_t stream) {
  cuuint64_t const hidden = static_cast<cuuint64_t>(p.hidden);
  cuuint64_t const dims[] = {hidden, static_cast<cuuint64_t>(p.tokens)};
  cuuint32_t const box[] = {COLUMNS, TOKENS};
  CUtensorMap x{};
  cudaError_t status = encode_tensor_map(x, p.x, 2, dims, box);
  if (status != cudaSuccess) return status;
  cuuint64_t const part_dims[] = {hidden, static_cast<cuuint64_t>(PARTS) * p.experts};
  cuuint32_t const part_box[] = {COLUMNS, EXPERTS / SHARERS};
  CUtensorMap weights{};
  status = encode_tensor_map(weights, ws.router_parts, 2, part_dims, part_box);
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(sm90_moe_long_logits, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                SHARED_BYTES);
  if (status != cudaSuccess) return status;

  int64_t const fours = p.experts * p.hidden / 4;
  sm90_moe_cut_router<<<static_cast<unsigned>(ceil_div(fours, CUT_THREADS)), CUT_THREADS, 0,
                        stream>>>(reinterpret_cast<float4 const*>(p.router_weight),
                                  reinterpret_cast<uint2*>(ws.router_parts), fours);
  status = cudaGetLastError();
  if (status != cudaSuccess) return status;
  int const splits = sm90_router_splits(p.tokens, p.hidden);
  int64_t const tiles = ceil_div(p.tokens, TOKENS * SHARERS) * SHARERS;
  dim3 const grid(static_cast<unsigned>(tiles), splits,
                  static_cast<unsigned>(ceil_div(p.experts, EXPERTS)));
  auto const all_stages = static_cast<int>(p.hidden / COLUMNS);
  auto const split_stages = static_cast<int>(ceil_div(all_stages, splits));
  return launch_clusters_behind(sm90_moe_long_logits, SHARERS, grid, THREADS, SHARED_BYTES, stream,
                                x, weights, p.tokens, p.experts, all_stages, split_stages,
                                ws.logits);
}

}  // namespace m3::kernels
