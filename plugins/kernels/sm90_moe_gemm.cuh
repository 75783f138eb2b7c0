#pragma once

#include <cuda.h>

#include <algorithm>

#include "kernels/cluster.cuh"
#include "kernels/global_memory.cuh"
#include "kernels/numeric.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/sm90_moe_math.cuh"
#include "kernels/sm90_moe_plan.h"
#include "kernels/sm90_moe_schedule.cuh"
#include "kernels/sm90_ptx.cuh"
#include "kernels/sm90_wgmma.cuh"
#include "kernels/tensor_map.h"
#include "kernels/this_device.h"

// The grouped GEMM of both expert products. Weights are the M operand: a warpgroup computes two
// blocks of 64 weight rows by N tokens. Which rows, and what becomes of the sums, is the `Product`.
namespace m3::kernels {

// Weights [.., groups, 8, neighbours, K]: a box brings two of the neighbours, so that lane l gets
// the sums of rows that lie side by side. In shared memory: [groups, 2, 8, 64], 16 rows a warp.
struct MoeWeightMaps {
  CUtensorMap part[kMaxExpertParts + 1];  // the last: shared expert
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
  // Where proj follows fc: of each expert, warps that have written their activations, `tile_warps`
  // for each of its token tiles.
  int32_t* done;
  int tile_warps;
  float* partials;
  int64_t partial_size;  // floats of one CTA's sums
  __nv_bfloat16* activations;
  MoeFour* outputs;
  float alpha, limit;
};

constexpr int SM90_MOE_THREADS = 384;  // warpgroup 0 loads, 1 and 2 multiply
constexpr int SM90_MOE_TOKEN_THREADS = 96;
// For stages and posts
constexpr int SM90_MOE_SHARED_ROOM =
    227 * 1024 - 1024 - static_cast<int>(sizeof(MoeTiles<8, 1>)) - 64;

// How the kernel cuts its work. TOKENS: of one tile, at most; the fewer, the more stages fit.
// SHARERS 2: two CTAs of a cluster take two parts of an expert's tokens, and each loads half of the
// weights into both: long steps are limited by what L2 delivers. Where tiles have few tokens, the
// two warpgroups that multiply take tiles of half the weights in turn, so that one stores while the
// other multiplies, whoever comes next takes the next tile, and proj follows fc expert by expert.
template <int TOKENS, int SHARERS>
struct MoeShape {
  static constexpr bool kInTurn = TOKENS <= 64;
  static constexpr int kTokens = TOKENS;
  static constexpr int kSharers = SHARERS;
  static constexpr int kRows = kInTurn ? SM90_MOE_WEIGHT_ROWS / 2 : SM90_MOE_WEIGHT_ROWS;
  static constexpr int kWeightBytes = kRows * SM90_MOE_K * 2;
  static constexpr int kStageBytes = kWeightBytes + TOKENS * SM90_MOE_K * 2;
  static constexpr int kPostBytes = static_cast<int>(sizeof(MoeSegment) + sizeof(MoeTokens)) + 24;
  static constexpr int kStages =
      (SM90_MOE_SHARED_ROOM - 3 * kPostBytes) / (kStageBytes + kPostBytes + 16);
  // Segments that the loaders may be ahead of those who multiply: one a stage, those whose results
  // are still written and the one in turn, the end.
  static constexpr int kPosts = kStages + 3;
};

template <class Shape>
struct MoeGemmShared {
  uint64_t full[Shape::kStages];
  uint64_t empty[Shape::kStages];
  uint64_t posted[Shape::kPosts];
  uint64_t drawn[Shape::kPosts];  // tickets, by the loader of weights for the others
  int tickets[Shape::kPosts];
  uint64_t turn[2];  // to multiply, of each warpgroup
  MoeSegment segments[Shape::kPosts];
  MoeTokens tokens[Shape::kPosts];
  MoeTiles<Shape::kTokens, Shape::kSharers> tiles;
  int last;
};

template <class Shape>
constexpr int SM90_MOE_SHARED_BYTES =
    1024 + Shape::kStages * Shape::kStageBytes + static_cast<int>(sizeof(MoeGemmShared<Shape>));

// Stage and phase of a ring.
template <int STAGES>
struct MoeRing {
  int stage = 0;
  int phase = 0;
  __device__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ void advance(int steps) {
    stage += steps;
    phase ^= stage / STAGES & 1;
    stage %= STAGES;
  }
};

template <class Product, class Shape>
struct MoeGemm {
  static constexpr int SHARERS = Shape::kSharers;
  static constexpr int STAGE_BYTES = Shape::kStageBytes;
  static constexpr int WEIGHT_BYTES = Shape::kWeightBytes;
  static constexpr int ROWS = Shape::kRows;
  // Begins with the experts whose activations are there while fc still makes others'.
  static constexpr bool FOLLOWS = !Product::kGather && Shape::kInTurn;
  using Ring = MoeRing<Shape::kStages>;

  MoeWeightMaps const& maps;
  MoeGemmArgs const& g;
  MoeGemmShared<Shape>& shared;
  uint32_t stages;  // shared address, 1024-byte aligned
  int sharer;       // rank in the cluster

  __device__ uint32_t full(int stage) const { return ptx::shared_address(&shared.full[stage]); }
  __device__ uint32_t empty(int stage) const { return ptx::shared_address(&shared.empty[stage]); }
  __device__ MoeSchedule schedule() const {
    return {shared.tiles.count(g.experts, g.weight_tiles), g.depth / SM90_MOE_K,
            static_cast<int>(blockIdx.x) / SHARERS, static_cast<int>(gridDim.x) / SHARERS,
            Shape::kInTurn};
  }
  __device__ MoeTokens tokens(int tile) const {
    return shared.tiles.find(tile, g.experts, g.weight_tiles, sharer);
  }

  // The loaders look for the next segment while the copies of one are under way.
  template <bool DRAWS>
  struct Ahead {
    MoeSchedule work;
    MoeSegment s;
    MoeTokens t;
    MoeRing<Shape::kPosts> tickets;
    int drawn = 0;
    bool more = true;

    __device__ explicit Ahead(MoeGemm const& gemm) : work(gemm.schedule()) { next(gemm); }
    // A ticket for the next segment, some time before it is needed.
    __device__ void draw(MoeGemm const& gemm) {
      if (Shape::kInTurn && DRAWS) drawn = atomicAdd(gemm.g.arrivals, 1);
    }
    __device__ void next(MoeGemm const& gemm) {
      more = work.next(s);
      if (Shape::kInTurn && !more) more = work.take(ticket(gemm), s);
      if (more) t = gemm.tokens(s.tile);
    }
    __device__ int ticket(MoeGemm const& gemm) {
      int volatile& ticket = gemm.shared.tickets[tickets.stage];
      uint32_t const barrier = ptx::shared_address(&gemm.shared.drawn[tickets.stage]);
      if (DRAWS) {
        ticket = drawn;
        ptx::barrier_arrive(barrier);
      } else {
        ptx::barrier_wait(barrier, tickets.phase);
      }
      tickets.advance();
      return ticket;
    }
  };

  // One thread
  __device__ void load_weights() const {
    constexpr int HALF = WEIGHT_BYTES / 2;
    // Stages asked for together: 512 bytes of a row of fc, half a row of proj where K is short
    constexpr int TOGETHER = !Shape::kInTurn ? 1 : Product::kGather ? 4 : 3;
    uint64_t const once = ptx::policy_evict_first();
    uint64_t const again = ptx::policy_evict_normal();
    Ring ring;
    for (Ahead<true> ahead(*this); ahead.more;) {
      MoeTokens const& t = ahead.t;
      bool const is_shared = t.expert == g.experts;
      int const part = divided(t.expert, g.experts_per_part);
      CUtensorMap const* map = &maps.part[is_shared ? kMaxExpertParts : part];
      int const expert_row = is_shared ? 0 : (t.expert - part * g.experts_per_part) * g.weight_rows;
      int2 const rows0 = Product::template rows<ROWS>(g, expert_row, t.weight_tile, 0);
      int2 const rows1 = Product::template rows<ROWS>(g, expert_row, t.weight_tile, 1);
      uint64_t const policy = t.alone ? once : again;
      int const k0 = ahead.s.k0;
      int const k1 = ahead.s.k1;
      int const last = min(k0 + Shape::kStages, k1) - 1;  // that the first ones need not wait for
      for (int k = k0; k < k1;) {
        int const count = min(TOGETHER - k % TOGETHER, k1 - k);
        Ring const first = ring;
        for (int i = 0; i < count; ++i, ring.advance()) {
          ptx::barrier_wait(empty(ring.stage), ring.phase ^ 1);
          ptx::barrier_expect(full(ring.stage), WEIGHT_BYTES);
        }
        for (int half = 0; half < 2; ++half) {
          if (SHARERS > 1 && half != sharer) continue;
          int2 const rows = half == 0 ? rows0 : rows1;
          Ring at = first;
          for (int i = 0; i < count; ++i, at.advance()) {
            uint32_t const target = stages + at.stage * STAGE_BYTES + half * HALF;
            int const x = (k + i) * SM90_MOE_K;
            if constexpr (SHARERS == 1) {
              ptx::tma_load(target, map, full(at.stage), x, 0, rows.x, rows.y, policy);
            } else {
              ptx::tma_load_multicast(target, map, full(at.stage), x, 0, rows.x, rows.y, 3, policy);
            }
          }
        }
        if (k == k0) ahead.draw(*this);
        k += count;
        if (k > last && k - count <= last) ahead.next(*this);
      }
    }
  }

  // Waits until fc has written all activations of an expert. Lanes look ahead: those of `known`
  // need no second look.
  __device__ void wait_done(int expert, int2& known) const {
    while (expert < known.x || expert >= known.y) {
      int const mine = min(expert + static_cast<int>(threadIdx.x) % 32, g.experts);
      int const wanted = g.tile_warps * shared.tiles.token_tiles(mine, g.experts);
      unsigned const missing = __ballot_sync(~0u, load_acquire(g.done + mine) < wanted);
      known = {expert, expert + (missing == 0 ? 32 : __ffs(static_cast<int>(missing)) - 1)};
    }
    __syncwarp();  // what any lane has seen
  }

  // Three warps gather the token rows, 8 threads a row, in TMA's swizzle.
  __device__ void load_tokens(int thread) const {
    constexpr int STEP = SM90_MOE_TOKEN_THREADS / 8;
    constexpr int EACH = (Shape::kTokens + STEP - 1) / STEP;  // rows of one thread
    static_assert(STEP % 4 == 0, "two swizzles alternate");
    // Few rows, which are read again until all weights have passed by.
    constexpr bool KEPT = Shape::kTokens <= 64;
    uint64_t const keep = ptx::policy_evict_last();
    int const chunk = thread % 8;
    int const row = thread / 8;
    uint32_t const even = row * 128 + ((chunk ^ (row & 7)) << 4);
    uint32_t const odd = (row + STEP) * 128 + ((chunk ^ ((row + STEP) & 7)) << 4);
    Ring ring;
    MoeRing<Shape::kPosts> posts;
    int2 known = {0, 0};  // experts
    for (Ahead<false> ahead(*this); ahead.more; posts.advance()) {
      int const rows = ahead.t.rows;
      if (FOLLOWS) wait_done(ahead.t.expert, known);
      uint32_t offsets[EACH];  // of my rows in `in`, in elements
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        int const at = row + i * STEP;
        if (at >= rows) break;
        int const place = ahead.t.place + at;
        int const source = Product::kGather ? divided(g.rows[place], g.slots) : place;
        offsets[i] = static_cast<uint32_t>(source) * g.depth;
      }
      int const k0 = ahead.s.k0;
      int const k1 = ahead.s.k1;
      int const last = min(k0 + Shape::kStages, k1) - 1;
      __nv_bfloat16 const* in = g.in + k0 * SM90_MOE_K + chunk * 8;
      for (int k = k0; k < k1; ++k, ring.advance(), in += SM90_MOE_K) {
        ptx::barrier_wait(empty(ring.stage), ring.phase ^ 1);
        uint32_t const target = stages + ring.stage * STAGE_BYTES + WEIGHT_BYTES;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
          if (row + i * STEP >= rows) break;
          uint32_t const place = (i % 2 == 0 ? even : odd) + i / 2 * 2 * STEP * 128;
          if constexpr (KEPT) {
            ptx::cp_async_16(target + place, in + offsets[i], keep);
          } else {
            ptx::cp_async_16(target + place, in + offsets[i]);
          }
        }
        ptx::cp_async_arrive(full(ring.stage));
        if (k == k0 && thread == 0) post(posts.stage, ahead.s, ahead.t);
        if (k == last) ahead.next(*this);
      }
    }
    if (thread == 0) post(posts.stage, {-1, 0, 0, 0, 0}, {});
  }

  // Tells those who multiply what comes next; tile -1 is the end.
  __device__ void post(int slot, MoeSegment const& s, MoeTokens const& t) const {
    shared.segments[slot] = s;
    shared.tokens[slot] = t;
    ptx::barrier_arrive(ptx::shared_address(&shared.posted[slot]));
  }

  // The sums of one segment, N tokens wide; then the tile's result, if nobody else has to add to
  // it.
  template <int N>
  __device__ void multiply(MoeSegment const& s, MoeTokens const& t, Ring& ring) const {
    int const part = Shape::kInTurn ? 0 : static_cast<int>(threadIdx.x) / 128 - 1;
    float sums[2][N / 2] = {};
    int previous = -1;
    for (int k = s.k0; k < s.k1; ++k, ring.advance()) {
      ptx::barrier_wait(full(ring.stage), ring.phase);
      ptx::fence_async_proxy();  // the tokens came through the other proxy
      uint32_t const stage = stages + ring.stage * STAGE_BYTES;
      uint64_t const a0 = wgmma::descriptor(stage + part * WEIGHT_BYTES / 4);
      uint64_t const a1 = a0 + WEIGHT_BYTES / 2 / 16;
      uint64_t const b = wgmma::descriptor(stage + WEIGHT_BYTES);
      wgmma::fence();
#pragma unroll
      for (int i = 0; i < SM90_MOE_K / 16; ++i) {
        wgmma::mma<N>(sums[0], a0 + 2 * i, b + 2 * i);
        wgmma::mma<N>(sums[1], a1 + 2 * i, b + 2 * i);
      }
      wgmma::commit();
      // All stages of the segment have come: the other warpgroup may wait for those behind.
      if (Shape::kInTurn && k == s.k1 - 1 && threadIdx.x % 32 == 0) {
        ptx::barrier_arrive(ptx::shared_address(&shared.turn[2 - threadIdx.x / 128]));
      }
      wgmma::wait<1>();
      if (previous >= 0) release(previous);
      previous = ring.stage;
    }
    wgmma::wait<0>();
    release(previous);
    if constexpr (!Shape::kInTurn) {  // those are never cut
      if (s.first_cta != s.last_cta && !add_parts<N>(s, sums)) return;
    }
    Product::template finish<N, ROWS>(g, t, part, sums);
    if (Product::kGather && Shape::kInTurn) {
      __syncwarp();  // all lanes' stores
      if (threadIdx.x % 32 == 0) ptx::add_release(g.done + t.expert, 1);
    }
  }

  // This warp has read the stage, into which all sharers write.
  __device__ void release(int stage) const {
    int const lane = threadIdx.x % 32;
    if (SHARERS == 1 && lane == 0) ptx::barrier_arrive(empty(stage));
    if (SHARERS > 1 && lane < SHARERS) ptx::barrier_arrive_at(empty(stage), lane);
  }

  // Leaves this CTA's sums in memory. The last CTA to do so adds all of them in the order of K and
  // returns true: the order of arrival decides who adds, not what is added.
  template <int N>
  __device__ bool add_parts(MoeSegment const& s, float (&sums)[2][N / 2]) const {
    constexpr int THREADS = 256;
    constexpr int BARRIER = 2;
    int const thread = static_cast<int>(threadIdx.x) - 128;
    // A CTA has at most two parts of tiles: one whose K it begins, and one that others began.
    auto slot = [&](int cta) {
      int64_t const index = 2 * (cta * SHARERS + sharer) + (cta == s.first_cta);
      return reinterpret_cast<float4*>(g.partials + index * g.partial_size) + thread;
    };
    float4* mine = slot(static_cast<int>(blockIdx.x) / SHARERS);
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      float const* v = &sums[i / (N / 8)][i % (N / 8) * 4];
      __stcg(mine + i * THREADS, make_float4(v[0], v[1], v[2], v[3]));
    }
    __threadfence();
    ptx::named_barrier(BARRIER, THREADS);  // all parts of this CTA are visible
    if (thread == 0) {
      int const before = atomicAdd(&g.arrivals[s.first_cta * SHARERS + sharer], 1);
      shared.last = before == s.last_cta - s.first_cta;
      __threadfence();
    }
    ptx::named_barrier(BARRIER, THREADS);  // last
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

  // With the least N that holds the tile's tokens
  template <int N, int... MORE>
  __device__ void multiply_by(MoeSegment const& s, MoeTokens const& t, Ring& ring) const {
    if constexpr (sizeof...(MORE) > 0) {
      if (t.rows > N) return multiply_by<MORE...>(s, t, ring);
    }
    multiply<N>(s, t, ring);
  }

  __device__ void multiply_all() const {
    Ring ring;
    int const group = static_cast<int>(threadIdx.x) / 128 - 1;
    int skip = Shape::kInTurn ? group : 0;  // segments of the other warpgroup
    int turn = group;                       // parity of mine
    for (MoeRing<Shape::kPosts> posts;; posts.advance()) {
      int const slot = posts.stage;
      ptx::barrier_wait(ptx::shared_address(&shared.posted[slot]), posts.phase);
      MoeSegment const s = shared.segments[slot];
      if (s.tile < 0) break;
      if (Shape::kInTurn) {
        if (skip-- > 0) {
          ring.advance(s.k1 - s.k0);
          continue;
        }
        skip = 1;
        ptx::barrier_wait(ptx::shared_address(&shared.turn[group]), turn ^= 1);
      }
      MoeTokens const t = shared.tokens[slot];
      if constexpr (Shape::kTokens == 32) {
        multiply_by<8, 16, 32>(s, t, ring);
      } else if constexpr (Shape::kTokens == 64) {
        multiply_by<8, 16, 32, 48, 64>(s, t, ring);
      } else {
        multiply_by<8, 16, 32, 48, 64, 80, 96, 112, 120, 128, 136, 144, 160>(s, t, ring);
      }
    }
  }
};

template <class Product, class Shape>
__global__ void __launch_bounds__(SM90_MOE_THREADS, 1)
    sm90_moe_gemm(__grid_constant__ MoeWeightMaps const maps,
                  __grid_constant__ MoeGemmArgs const g) {
  extern __shared__ char dynamic[];
  uint32_t const base = ptx::shared_address(dynamic);
  uint32_t const aligned = (base + 1023) / 1024 * 1024;
  auto& shared = *reinterpret_cast<MoeGemmShared<Shape>*>(dynamic + (aligned - base) +
                                                          Shape::kStages * Shape::kStageBytes);
  constexpr int SHARERS = Shape::kSharers;
  int const sharer = SHARERS == 1 ? 0 : cluster_rank();
  using Gemm = MoeGemm<Product, Shape>;
  Gemm const gemm{maps, g, shared, aligned, sharer};
  int const warp = threadIdx.x / 32;
  if (threadIdx.x <= kMaxExpertParts) ptx::prefetch_map(&maps.part[threadIdx.x]);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      ptx::barrier_init(gemm.full(i), 1 + SM90_MOE_TOKEN_THREADS);
      ptx::barrier_init(gemm.empty(i), (Shape::kInTurn ? 4 : 8) * SHARERS);
    }
    for (uint64_t const& turn : shared.turn) ptx::barrier_init(ptx::shared_address(&turn), 4);
    for (int i = 0; i < Shape::kPosts; ++i) {
      ptx::barrier_init(ptx::shared_address(&shared.posted[i]), 1);
      ptx::barrier_init(ptx::shared_address(&shared.drawn[i]), 1);
    }
    ptx::barrier_init_fence();
  }
  // The lists were made before the kernel that makes proj's input began: only fc has to wait here.
  if (Product::kGather) wait_for_previous_kernel();
  shared.tiles.fill(g.expert_begin, g.experts);
  __syncthreads();                  // barriers, tiles
  if (SHARERS > 1) meet_cluster();  // barriers of the others
  if (Product::kGather) let_next_kernel_start();

  if (warp < 4) {
    ptx::registers_down<104>();
    if (warp > 0) {
      if (!Product::kGather && !Gemm::FOLLOWS) wait_for_previous_kernel();
      gemm.load_tokens(threadIdx.x - 32);
    } else if (threadIdx.x == 0) {
      gemm.load_weights();
    }
  } else {
    ptx::registers_up<200>();
    if (!Product::kGather) {
      if (!Gemm::FOLLOWS) wait_for_previous_kernel();
      let_next_kernel_start();
    }
    gemm.multiply_all();
    if (Gemm::FOLLOWS) wait_for_previous_kernel();
  }
  if (SHARERS > 1) {  // a CTA that is gone cannot be written to
    __syncwarp();
    meet_cluster();
  }
}

// What a launch does not vary; ROWS: weight rows of a tile.
template <int ROWS>
void fill_sm90_moe_gemm_args(MoeGemmArgs& g, MoeParams const& p, Sm90MoeWorkspace const& ws) {
  g.weight_tiles = static_cast<int>(ceil_div(g.weight_rows, ROWS));
  g.experts = p.experts;
  g.experts_per_part = p.experts / p.parts;
  g.slots = p.top_k + 1;
  g.rows = ws.rows;
  g.expert_begin = ws.expert_begin;
  g.partials = ws.partials;
  g.done = ws.done;
  g.tile_warps = 4 * static_cast<int>(ceil_div(2 * p.width, SM90_MOE_WEIGHT_ROWS / 2));
  g.partial_size = sm90_moe_partial_size(p.tokens);
  g.activations = ws.activations;
  g.outputs = ws.outputs;
  g.alpha = p.swiglu_alpha;
  g.limit = p.swiglu_limit;
}

// `parts` [p.parts]: weights of [experts / parts, weight_rows, depth]; `shared`: [weight_rows,
// depth].
template <class Product, int BOX_ROWS>
cudaError_t encode_sm90_moe_weights(MoeWeightMaps& maps, MoeGemmArgs const& g, MoeParams const& p,
                                    void const* const* parts, void const* shared) {
  auto const encode = [&g](CUtensorMap& map, void const* data, int experts) {
    constexpr int NEIGHBOURS = Product::kNeighbours;
    cuuint64_t const row = static_cast<cuuint64_t>(g.depth) * 2;
    cuuint64_t const groups = static_cast<cuuint64_t>(experts) * g.weight_rows / (8 * NEIGHBOURS);
    cuuint64_t const dims[] = {static_cast<cuuint64_t>(g.depth), 8, NEIGHBOURS, groups};
    cuuint64_t const strides[] = {NEIGHBOURS * row, row, 8 * NEIGHBOURS * row};
    cuuint32_t const box[] = {64, 8, 2, BOX_ROWS / 16};
    // The other half of 256 bytes is a stage later, by which time L2 may have given it up again.
    return encode_tensor_map(map, data, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, dims, strides, box,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  };
  cudaError_t status = encode(maps.part[kMaxExpertParts], shared, 1);
  for (int i = 0; i < p.parts && status == cudaSuccess; ++i) {
    status = encode(maps.part[i], parts[i], g.experts_per_part);
  }
  return status;
}

// Launches one CTA for each multiprocessor.
template <class Product, class Shape>
cudaError_t launch_sm90_moe_gemm_as(MoeParams const& p, void const* const* parts,
                                    void const* shared, MoeGemmArgs g, Sm90MoeWorkspace const& ws,
                                    cudaStream_t stream) {
  fill_sm90_moe_gemm_args<Shape::kRows>(g, p, ws);
  MoeWeightMaps maps{};
  cudaError_t status =
      encode_sm90_moe_weights<Product, Shape::kRows / 2>(maps, g, p, parts, shared);
  if (status != cudaSuccess) return status;

  int processors = 0;
  status = count_processors(processors);
  if (status != cudaSuccess) return status;
  auto* kernel = sm90_moe_gemm<Product, Shape>;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                SM90_MOE_SHARED_BYTES<Shape>);
  if (status != cudaSuccess) return status;
  auto const ctas = static_cast<unsigned>(std::min(processors, SM90_MOE_MAX_CTAS));
  return launch_clusters_behind(kernel, Shape::kSharers, ctas / Shape::kSharers * Shape::kSharers,
                                SM90_MOE_THREADS, SM90_MOE_SHARED_BYTES<Shape>, stream, maps, g);
}

template <class Product>
cudaError_t launch_sm90_moe_gemm(MoeParams const& p, void const* const* parts, void const* shared,
                                 MoeGemmArgs const& g, Sm90MoeWorkspace const& ws,
                                 cudaStream_t stream) {
  // Measured: notes/moe.md.
  int64_t const average = p.tokens * p.top_k / p.experts;
  auto* launch = launch_sm90_moe_gemm_as<Product, MoeShape<160, 2>>;
  if (average <= SM90_MOE_SHORT_TOKENS) {
    bool const few = p.tokens <= 32 || (p.tokens > 64 && p.tokens <= 128);
    launch = few ? launch_sm90_moe_gemm_as<Product, MoeShape<32, 1>>
                 : launch_sm90_moe_gemm_as<Product, MoeShape<64, 1>>;
  } else if (average <= SM90_MOE_MAX_TOKENS) {
    launch = launch_sm90_moe_gemm_as<Product, MoeShape<160, 1>>;
  }
  return launch(p, parts, shared, g, ws, stream);
}

}  // namespace m3::kernels
