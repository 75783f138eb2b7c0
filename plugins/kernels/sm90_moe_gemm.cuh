#pragma once

#include <cuda.h>

#include <algorithm>

#include "kernels/numeric.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/sm90_moe_plan.h"
#include "kernels/sm90_moe_schedule.cuh"
#include "kernels/sm90_ptx.cuh"
#include "kernels/sm90_wgmma.cuh"
#include "kernels/tensor_map.h"
#include "kernels/this_device.h"

// The grouped GEMM of both expert products. Weights are the M operand: a warpgroup computes two
// blocks of 64 weight rows by N tokens. Which rows, and what becomes of the sums, is the `Product`.
namespace m3::kernels {

struct MoeWeightMaps {
  CUtensorMap part[kMaxExpertParts + 1];  // [rows, K], boxes of 128 x 64; the last: shared expert
};

struct MoeGemmArgs {
  __nv_bfloat16 const* in;  // [.., depth]
  int depth;
  int weight_rows;   // of one expert
  int weight_tiles;  // of one expert
  int experts, experts_per_part, slots;
  int32_t const* rows;
  int32_t const* expert_begin;
  int32_t* arrivals;  // [SM90_MOE_MAX_CTAS], of this product
  float* partials;
  int64_t partial_size;  // floats of one CTA's sums
  __nv_bfloat16* activations;
  float* outputs;
  float alpha, limit;
};

constexpr int SM90_MOE_STAGES = 4;
constexpr int SM90_MOE_THREADS = 384;  // warpgroup 0 loads, 1 and 2 multiply
constexpr int SM90_MOE_TOKEN_THREADS = 96;
constexpr int SM90_MOE_WEIGHT_BYTES = SM90_MOE_WEIGHT_ROWS * SM90_MOE_K * 2;
constexpr int SM90_MOE_STAGE_BYTES = SM90_MOE_WEIGHT_BYTES + SM90_MOE_MAX_TOKENS * SM90_MOE_K * 2;

struct MoeGemmShared {
  uint64_t full[SM90_MOE_STAGES];
  uint64_t empty[SM90_MOE_STAGES];
  int rows[2][SM90_MOE_MAX_TOKENS];  // of this tile and the next
  MoeTiles tiles;
  int last;
};

constexpr int SM90_MOE_SHARED_BYTES =
    1024 + SM90_MOE_STAGES * SM90_MOE_STAGE_BYTES + static_cast<int>(sizeof(MoeGemmShared));

// Stage and phase of the ring.
struct MoeRing {
  int stage = 0;
  int phase = 0;
  __device__ void advance() {
    if (++stage == SM90_MOE_STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

template <class Product>
struct MoeGemm {
  MoeWeightMaps const& maps;
  MoeGemmArgs const& g;
  MoeGemmShared& shared;
  uint32_t stages;  // shared address, 1024-byte aligned

  __device__ uint32_t full(int stage) const { return ptx::shared_address(&shared.full[stage]); }
  __device__ uint32_t empty(int stage) const { return ptx::shared_address(&shared.empty[stage]); }
  __device__ MoeSchedule schedule() const {
    return {shared.tiles.count(g.experts, g.weight_tiles), g.depth / SM90_MOE_K,
            static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
  }
  __device__ MoeTokens tokens(int tile) const {
    return shared.tiles.find(tile, g.experts, g.weight_tiles);
  }

  // One thread
  __device__ void load_weights() const {
    constexpr int HALF = SM90_MOE_WEIGHT_BYTES / 2;
    uint64_t const once = ptx::policy_evict_first();
    uint64_t const again = ptx::policy_evict_normal();
    MoeRing ring;
    MoeSchedule work = schedule();
    for (MoeSegment s; work.next(s);) {
      MoeTokens const t = tokens(s.tile);
      bool const is_shared = t.expert == g.experts;
      CUtensorMap const* map =
          &maps.part[is_shared ? kMaxExpertParts : t.expert / g.experts_per_part];
      int const expert_row = is_shared ? 0 : t.expert % g.experts_per_part * g.weight_rows;
      int const row0 = expert_row + Product::first_row(g, t.weight_tile, 0);
      int const row1 = expert_row + Product::first_row(g, t.weight_tile, 1);
      uint64_t const policy = t.alone ? once : again;
      for (int k = s.k0; k < s.k1; ++k, ring.advance()) {
        ptx::barrier_wait(empty(ring.stage), ring.phase ^ 1);
        uint32_t const barrier = full(ring.stage);
        ptx::barrier_expect(barrier, SM90_MOE_WEIGHT_BYTES);
        uint32_t const target = stages + ring.stage * SM90_MOE_STAGE_BYTES;
        ptx::tma_load(target, map, barrier, k * SM90_MOE_K, row0, policy);
        ptx::tma_load(target + HALF, map, barrier, k * SM90_MOE_K, row1, policy);
      }
    }
  }

  // Three warps gather the token rows, 8 threads a row, in TMA's swizzle.
  __device__ void load_tokens(int thread) const {
    constexpr int STEP = SM90_MOE_TOKEN_THREADS / 8;
    constexpr int ROWS = (SM90_MOE_MAX_TOKENS + STEP - 1) / STEP;  // of one thread
    static_assert(STEP % 4 == 0, "two swizzles alternate");
    int const chunk = thread % 8;
    int const row = thread / 8;
    uint32_t const even = row * 128 + ((chunk ^ (row & 7)) << 4);
    uint32_t const odd = (row + STEP) * 128 + ((chunk ^ ((row + STEP) & 7)) << 4);
    MoeRing ring;
    MoeSchedule work = schedule();
    for (MoeSegment s; work.next(s);) {
      MoeTokens const t = tokens(s.tile);
      uint32_t offsets[ROWS];  // of my rows in `in`, in elements
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        int const at = row + i * STEP;
        if (at >= t.rows) break;
        int const source = Product::kGather ? g.rows[t.place + at] / g.slots : t.place + at;
        offsets[i] = static_cast<uint32_t>(source) * g.depth;
      }
      __nv_bfloat16 const* in = g.in + s.k0 * SM90_MOE_K + chunk * 8;
      for (int k = s.k0; k < s.k1; ++k, ring.advance(), in += SM90_MOE_K) {
        ptx::barrier_wait(empty(ring.stage), ring.phase ^ 1);
        uint32_t const target = stages + ring.stage * SM90_MOE_STAGE_BYTES + SM90_MOE_WEIGHT_BYTES;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
          if (row + i * STEP >= t.rows) break;
          uint32_t const place = (i % 2 == 0 ? even : odd) + i / 2 * 2 * STEP * 128;
          ptx::cp_async_16(target + place, in + offsets[i]);
        }
        ptx::cp_async_arrive(full(ring.stage));
      }
    }
  }

  // The sums of one segment, N tokens wide; then the tile's result, if nobody else has to add to
  // it.
  template <int N>
  __device__ void multiply(MoeSegment const& s, MoeTokens const& t, int const* rows,
                           MoeRing& ring) const {
    int const group = threadIdx.x / 128 - 1;
    float sums[2][N / 2] = {};
    int previous = -1;
    for (int k = s.k0; k < s.k1; ++k, ring.advance()) {
      ptx::barrier_wait(full(ring.stage), ring.phase);
      ptx::fence_async_proxy();  // the tokens came through the other proxy
      uint32_t const stage = stages + ring.stage * SM90_MOE_STAGE_BYTES;
      uint64_t const a0 = wgmma::descriptor(stage + group * SM90_MOE_WEIGHT_BYTES / 4);
      uint64_t const a1 = a0 + SM90_MOE_WEIGHT_BYTES / 2 / 16;
      uint64_t const b = wgmma::descriptor(stage + SM90_MOE_WEIGHT_BYTES);
      wgmma::fence();
#pragma unroll
      for (int i = 0; i < SM90_MOE_K / 16; ++i) {
        wgmma::mma<N>(sums[0], a0 + 2 * i, b + 2 * i);
        wgmma::mma<N>(sums[1], a1 + 2 * i, b + 2 * i);
      }
      wgmma::commit();
      wgmma::wait<1>();
      if (previous >= 0) release(previous);
      previous = ring.stage;
    }
    wgmma::wait<0>();
    release(previous);
    if (s.first_cta != s.last_cta && !add_parts<N>(s, sums)) return;
    Product::template finish<N>(g, t, group, rows, sums);
  }

  // This warp has read the stage.
  __device__ void release(int stage) const {
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(empty(stage));
  }

  // Leaves this CTA's sums in memory. The last CTA to do so adds all of them in the order of K and
  // returns true: the order of arrival decides who adds, not what is added.
  template <int N>
  __device__ bool add_parts(MoeSegment const& s, float (&sums)[2][N / 2]) const {
    constexpr int BARRIER = 2;
    constexpr int THREADS = 256;
    int const thread = threadIdx.x - 128;
    // A CTA has at most two parts of tiles: one whose K it begins, and one that others began.
    auto slot = [&](int cta) {
      int64_t const index = 2 * cta + (cta == s.first_cta);
      return reinterpret_cast<float4*>(g.partials + index * g.partial_size) + thread;
    };
    float4* mine = slot(blockIdx.x);
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      float const* v = &sums[i / (N / 8)][i % (N / 8) * 4];
      __stcg(mine + i * THREADS, make_float4(v[0], v[1], v[2], v[3]));
    }
    __threadfence();
    ptx::named_barrier(BARRIER, THREADS);  // all parts of this CTA are visible
    if (thread == 0) {
      int const before = atomicAdd(&g.arrivals[s.first_cta], 1);
      shared.last = before == s.last_cta - s.first_cta;
      __threadfence();
    }
    ptx::named_barrier(BARRIER, THREADS);  // shared.last
    bool const last = shared.last;
    if (!last) return false;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sums[0][i] = sums[1][i] = 0.0f;
#pragma unroll(N <= 16 ? 8 : 1)
    for (int cta = s.first_cta; cta <= s.last_cta; ++cta) {
      float4 const* part = slot(cta);
#pragma unroll
      for (int i = 0; i < N / 4; ++i) {
        float4 const v = __ldcg(part + i * THREADS);
        float* sum = &sums[i / (N / 8)][i % (N / 8) * 4];
        sum[0] += v.x;
        sum[1] += v.y;
        sum[2] += v.z;
        sum[3] += v.w;
      }
    }
    return true;
  }

  __device__ void multiply_all() const {
    constexpr int BARRIER = 3;
    int const thread = threadIdx.x - 128;
    MoeRing ring;
    MoeSchedule work = schedule();
    int turn = 0;
    for (MoeSegment s; work.next(s); turn ^= 1) {
      MoeTokens const t = tokens(s.tile);
      int* rows = shared.rows[turn];
      if (thread < t.rows) rows[thread] = g.rows[t.place + thread];
      ptx::named_barrier(BARRIER, 256);  // rows are written; those before the last are read
      if (t.rows <= 8) {
        multiply<8>(s, t, rows, ring);
      } else if (t.rows <= 16) {
        multiply<16>(s, t, rows, ring);
      } else if (t.rows <= 32) {
        multiply<32>(s, t, rows, ring);
      } else if (t.rows <= 48) {
        multiply<48>(s, t, rows, ring);
      } else if (t.rows <= 64) {
        multiply<64>(s, t, rows, ring);
      } else if (t.rows <= 80) {
        multiply<80>(s, t, rows, ring);
      } else if (t.rows <= 96) {
        multiply<96>(s, t, rows, ring);
      } else if (t.rows <= 112) {
        multiply<112>(s, t, rows, ring);
      } else if (t.rows <= 120) {
        multiply<120>(s, t, rows, ring);
      } else if (t.rows <= 128) {
        multiply<128>(s, t, rows, ring);
      } else if (t.rows <= 136) {
        multiply<136>(s, t, rows, ring);
      } else if (t.rows <= 144) {
        multiply<144>(s, t, rows, ring);
      } else {
        multiply<160>(s, t, rows, ring);
      }
    }
  }
};

template <class Product>
__global__ void __launch_bounds__(SM90_MOE_THREADS, 1)
    sm90_moe_gemm(__grid_constant__ MoeWeightMaps const maps,
                  __grid_constant__ MoeGemmArgs const g) {
  extern __shared__ char dynamic[];
  uint32_t const base = ptx::shared_address(dynamic);
  uint32_t const aligned = (base + 1023) / 1024 * 1024;
  auto& shared = *reinterpret_cast<MoeGemmShared*>(dynamic + (aligned - base) +
                                                   SM90_MOE_STAGES * SM90_MOE_STAGE_BYTES);
  MoeGemm<Product> const gemm{maps, g, shared, aligned};
  int const warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < SM90_MOE_STAGES; ++i) {
      ptx::barrier_init(gemm.full(i), 1 + SM90_MOE_TOKEN_THREADS);
      ptx::barrier_init(gemm.empty(i), 8);
    }
    ptx::barrier_init_fence();
  }
  // The lists were made before the kernel that makes proj's input began: only fc has to wait here.
  if (Product::kGather) wait_for_previous_kernel();
  shared.tiles.fill(g.expert_begin, g.experts);
  __syncthreads();  // barriers, tiles
  if (Product::kGather) let_next_kernel_start();

  if (warp < 4) {
    ptx::registers_down<56>();
    if (warp > 0) {
      if (!Product::kGather) wait_for_previous_kernel();
      gemm.load_tokens(threadIdx.x - 32);
    } else if (threadIdx.x == 0) {
      gemm.load_weights();
    }
  } else {
    ptx::registers_up<224>();
    if (!Product::kGather) {
      wait_for_previous_kernel();
      let_next_kernel_start();
    }
    gemm.multiply_all();
  }
}

// Encodes the maps and launches one CTA for each multiprocessor. `parts` [p.parts]: weights of
// [experts / parts, weight_rows, depth]; `shared`: [weight_rows, depth].
template <class Product>
cudaError_t launch_sm90_moe_gemm(MoeParams const& p, void const* const* parts, void const* shared,
                                 MoeGemmArgs g, Sm90MoeWorkspace const& ws, cudaStream_t stream) {
  constexpr int BOX_ROWS = SM90_MOE_WEIGHT_ROWS / 2;
  g.experts = p.experts;
  g.experts_per_part = p.experts / p.parts;
  g.slots = p.top_k + 1;
  g.rows = ws.rows;
  g.expert_begin = ws.expert_begin;
  g.partials = ws.partials;
  g.partial_size = sm90_moe_partial_size(p.tokens);
  g.activations = ws.activations;
  g.outputs = ws.outputs;
  g.alpha = p.swiglu_alpha;
  g.limit = p.swiglu_limit;

  MoeWeightMaps maps{};
  auto const encode = [&g](CUtensorMap& map, void const* data, int experts) {
    cuuint64_t const dims[] = {static_cast<cuuint64_t>(g.depth),
                               static_cast<cuuint64_t>(experts) * g.weight_rows};
    cuuint32_t const box[] = {64, BOX_ROWS};
    return encode_tensor_map(map, data, 2, dims, box);
  };
  cudaError_t status = encode(maps.part[kMaxExpertParts], shared, 1);
  for (int i = 0; i < p.parts && status == cudaSuccess; ++i) {
    status = encode(maps.part[i], parts[i], g.experts_per_part);
  }
  if (status != cudaSuccess) return status;

  int processors = 0;
  status = count_processors(processors);
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(sm90_moe_gemm<Product>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                SM90_MOE_SHARED_BYTES);
  if (status != cudaSuccess) return status;
  auto const ctas = static_cast<unsigned>(std::min(processors, SM90_MOE_MAX_CTAS));
  return launch_behind(sm90_moe_gemm<Product>, ctas, SM90_MOE_THREADS, SM90_MOE_SHARED_BYTES,
                       stream, maps, g);
}

}  // namespace m3::kernels
