#pragma once

#include <cuda.h>

#include "kernels/cluster.cuh"
#include "kernels/numeric.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/sm90_moe_gemm.cuh"

// The second expert product where K is short: a CTA keeps all of K of its tokens in shared memory
// and runs over tiles of weight rows, which alone are streamed. Two warpgroups take tiles in turn,
// so that one stores its sums while the other multiplies.
namespace m3::kernels {

constexpr int SM90_MOE_RUN_ROWS = 128;  // weight rows of a tile, two blocks of 64
constexpr int SM90_MOE_RUN_STAGE_BYTES = SM90_MOE_RUN_ROWS * SM90_MOE_K * 2;
constexpr int SM90_MOE_RUN_MAX_STAGES = 12;
constexpr int SM90_MOE_RUN_TOKENS = SM90_MOE_MAX_TOKENS;
constexpr int SM90_MOE_RUN_MIN_STAGES = 5;

struct MoeRunMaps {
  MoeWeightMaps weights;
  CUtensorMap tokens;
};

// Weight tiles of one token tile.
struct MoeRun {
  int expert;
  int place, rows;
  int tile, end;
  bool alone;
};

// The tiles of entry e, expert e, cost the same each; entry `experts` is the shared expert.
template <int SHARERS>
struct MoeRunTables {
  int begin[kMaxExperts + 2];
  int prefix[kMaxExperts + 2];  // cost of all token tiles before, for one weight tile

  struct Entry {
    int rows, tiles, each, cost;
  };

  __device__ Entry entry(int e) const {
    // Rows that take as long as the weights of a tile, and what every tile takes beside its rows
    constexpr int WEIGHTS = 128 / SHARERS;
    constexpr int BORDER = 12;
    Entry v;
    v.rows = begin[e + 1] - begin[e];
    v.tiles = (v.rows + SHARERS * SM90_MOE_RUN_TOKENS - 1) / (SHARERS * SM90_MOE_RUN_TOKENS);
    int const parts = max(1, v.tiles * SHARERS);
    v.each = ((v.rows + parts - 1) / parts + 7) / 8 * 8;
    v.cost = max(v.each, WEIGHTS) + BORDER;
    return v;
  }

  // All threads of the block; a barrier must follow.
  __device__ void fill(int32_t const* expert_begin, int experts) {
    for (int i = threadIdx.x; i < experts + 2; i += blockDim.x) begin[i] = expert_begin[i];
    __syncthreads();  // begin
    prefix_sums(experts + 1, prefix, [&](int e) {
      Entry const v = entry(e);
      return v.tiles * v.cost;
    });
  }
};

// A cluster's share: all tiles, ordered by expert, token tile and weight tile, are cut into
// stretches of equal cost.
template <int SHARERS>
class MoeRunWalk {
 public:
  using Tables = MoeRunTables<SHARERS>;
  __device__ MoeRunWalk(Tables const& tables, int experts, int weight_tiles)
      : tables_(tables), experts_(experts), weight_tiles_(weight_tiles) {
    int const cluster = static_cast<int>(blockIdx.x) / SHARERS;
    int const clusters = static_cast<int>(gridDim.x) / SHARERS;
    int64_t const total = int64_t{tables.prefix[experts + 1]} * weight_tiles;
    auto const start = static_cast<int>(total * cluster / clusters);
    stop_ = static_cast<int>(total * (cluster + 1) / clusters);
    int low = 0;
    int high = experts + 1;
    while (high - low > 1) {
      int const middle = (low + high) / 2;
      (tables.prefix[middle] * weight_tiles <= start ? low : high) = middle;
    }
    entry_ = low;
    int const cost = tables.entry(low).cost;
    index_ = (start - tables.prefix[low] * weight_tiles + cost - 1) / cost;
  }

  // `sharer` is this CTA's rank in the cluster.
  __device__ bool next(MoeRun& run, int sharer) {
    for (; entry_ <= experts_; ++entry_, index_ = 0) {
      auto const v = tables_.entry(entry_);
      int const left = stop_ - tables_.prefix[entry_] * weight_tiles_ - index_ * v.cost;
      if (left <= 0) return false;
      int const token_tile = index_ / weight_tiles_;
      if (token_tile >= v.tiles) continue;
      run.expert = entry_;
      run.tile = index_ % weight_tiles_;
      run.end = min(weight_tiles_, run.tile + (left + v.cost - 1) / v.cost);
      int const first = (token_tile * SHARERS + sharer) * v.each;
      run.place = tables_.begin[entry_] + first;
      run.rows = max(0, min(v.each, v.rows - first));
      run.alone = v.tiles == 1;
      index_ += run.end - run.tile;
      return true;
    }
    return false;
  }

 private:
  Tables const& tables_;
  int experts_, weight_tiles_;
  int entry_, index_;  // the next tile: index in its entry, weight tiles innermost
  int stop_;           // cost at which the next cluster begins
};

template <int SHARERS>
struct MoeRunShared {
  uint64_t full[SM90_MOE_RUN_MAX_STAGES];
  uint64_t empty[SM90_MOE_RUN_MAX_STAGES];
  uint64_t tokens_full, tokens_empty;
  uint64_t turn[2];
  MoeRunTables<SHARERS> tables;
};

// Stages that fit beside the tokens.
constexpr int sm90_moe_run_stages(int64_t depth) {
  int64_t const room = 227 * 1024 - 1024 - sizeof(MoeRunShared<2>);
  int64_t const stages = (room - SM90_MOE_RUN_TOKENS * depth * 2) / SM90_MOE_RUN_STAGE_BYTES;
  return static_cast<int>(stages < SM90_MOE_RUN_MAX_STAGES ? stages : SM90_MOE_RUN_MAX_STAGES);
}

template <class Product, int SHARERS>
struct MoeRunGemm {
  static constexpr int SLAB_BYTES = SM90_MOE_RUN_TOKENS * SM90_MOE_K * 2;
  static constexpr int STAGE_BYTES = SM90_MOE_RUN_STAGE_BYTES;
  using Walk = MoeRunWalk<SHARERS>;

  MoeRunMaps const& maps;
  MoeGemmArgs const& g;
  MoeRunShared<SHARERS>& shared;
  uint32_t tokens, weights;  // shared addresses, 1024-byte aligned
  int stages, slabs;         // slabs: of 64 elements of K
  int sharer;

  struct Ring {
    int stage = 0;
    int phase = 0;
    __device__ void advance(int steps, int stages) {
      stage += steps;
      while (stage >= stages) {
        stage -= stages;
        phase ^= 1;
      }
    }
  };

  __device__ uint32_t full(int stage) const { return ptx::shared_address(&shared.full[stage]); }
  __device__ uint32_t empty(int stage) const { return ptx::shared_address(&shared.empty[stage]); }
  __device__ Walk walk() const { return {shared.tables, g.experts, g.weight_tiles}; }

  // One thread
  __device__ void load_weights() const {
    uint64_t const once = ptx::policy_evict_first();
    uint64_t const again = ptx::policy_evict_normal();
    constexpr int HALF = STAGE_BYTES / 2;
    Ring ring;
    Walk walk = this->walk();
    for (MoeRun run; walk.next(run, sharer);) {
      bool const is_shared = run.expert == g.experts;
      CUtensorMap const* map =
          &maps.weights.part[is_shared ? kMaxExpertParts : run.expert / g.experts_per_part];
      int const expert_row = is_shared ? 0 : run.expert % g.experts_per_part * g.weight_rows;
      uint64_t const policy = run.alone ? once : again;
      for (int tile = run.tile; tile < run.end; ++tile) {
        int2 rows[2];
        for (int i = 0; i < 2; ++i) {
          rows[i] = Product::template rows<SM90_MOE_RUN_ROWS>(g, expert_row, tile, i);
        }
        for (int k = 0; k < slabs; ++k, ring.advance(1, stages)) {
          ptx::barrier_wait(empty(ring.stage), ring.phase ^ 1);
          uint32_t const barrier = full(ring.stage);
          ptx::barrier_expect(barrier, STAGE_BYTES);
          uint32_t const target = weights + ring.stage * STAGE_BYTES;
          int const x = k * SM90_MOE_K;
          if constexpr (SHARERS == 1) {
            ptx::tma_load(target, map, barrier, x, 0, rows[0].x, rows[0].y, policy);
            ptx::tma_load(target + HALF, map, barrier, x, 0, rows[1].x, rows[1].y, policy);
          } else {
            int2 const mine = sharer == 0 ? rows[0] : rows[1];
            ptx::tma_load_multicast(target + sharer * HALF, map, barrier, x, 0, mine.x, mine.y, 3,
                                    policy);
          }
        }
      }
    }
  }

  // One thread
  __device__ void load_tokens() const {
    uint64_t const policy = ptx::policy_evict_normal();
    uint32_t const barrier = ptx::shared_address(&shared.tokens_full);
    uint32_t const free = ptx::shared_address(&shared.tokens_empty);
    Walk walk = this->walk();
    int phase = 1;
    for (MoeRun run; walk.next(run, sharer); phase ^= 1) {
      ptx::barrier_wait(free, phase);
      ptx::barrier_expect(barrier, slabs * SLAB_BYTES);
      for (int k = 0; k < slabs; ++k) {
        ptx::tma_load(tokens + k * SLAB_BYTES, &maps.tokens, barrier, k * SM90_MOE_K, run.place,
                      policy);
      }
    }
  }

  // Of the warpgroup `group`
  struct State {
    Ring ring;
    int group;
    int turn;          // parity of mine
    int sequence = 0;  // tiles before
    int phase = 0;     // of tokens
  };

  template <int N>
  __device__ void multiply(MoeRun const& run, State& state) const {
    int const lane = threadIdx.x % 32;
    bool first = true;
    for (int tile = run.tile; tile < run.end; ++tile) {
      if ((state.sequence++ & 1) != state.group) {
        state.ring.advance(slabs, stages);
        continue;
      }
      ptx::barrier_wait(ptx::shared_address(&shared.turn[state.group]), state.turn ^= 1);
      if (first) ptx::barrier_wait(ptx::shared_address(&shared.tokens_full), state.phase);
      first = false;
      float sums[2][N / 2] = {};
      int previous = -1;
      for (int k = 0; k < slabs; ++k, state.ring.advance(1, stages)) {
        int const stage = state.ring.stage;
        ptx::barrier_wait(full(stage), state.ring.phase);
        uint64_t const a0 = wgmma::descriptor(weights + stage * STAGE_BYTES);
        uint64_t const a1 = a0 + STAGE_BYTES / 2 / 16;
        uint64_t const b = wgmma::descriptor(tokens + k * SLAB_BYTES);
        wgmma::fence();
#pragma unroll
        for (int i = 0; i < SM90_MOE_K / 16; ++i) {
          wgmma::mma<N>(sums[0], a0 + 2 * i, b + 2 * i);
          wgmma::mma<N>(sums[1], a1 + 2 * i, b + 2 * i);
        }
        wgmma::commit();
        // All stages of the tile have come: the other warpgroup may wait for those behind.
        if (k == slabs - 1 && lane == 0) {
          ptx::barrier_arrive(ptx::shared_address(&shared.turn[1 - state.group]));
        }
        wgmma::wait<1>();
        if (previous >= 0) release(previous);
        previous = stage;
      }
      wgmma::wait<0>();
      release(previous);
      if (tile + 2 >= run.end && lane == 0) {
        ptx::barrier_arrive(ptx::shared_address(&shared.tokens_empty));
      }
      MoeTokens const t{run.expert, tile, run.place, run.rows, run.alone};
      Product::template finish<N, SM90_MOE_RUN_ROWS>(g, t, 0, sums);
    }
    if (first && lane == 0) ptx::barrier_arrive(ptx::shared_address(&shared.tokens_empty));
    state.phase ^= 1;
  }

  // This warp has read the stage, into which all sharers write.
  __device__ void release(int stage) const {
    int const lane = threadIdx.x % 32;
    if (SHARERS == 1 && lane == 0) ptx::barrier_arrive(empty(stage));
    if (SHARERS > 1 && lane < SHARERS) ptx::barrier_arrive_at(empty(stage), lane);
  }

  // With the least N that holds the run's tokens
  template <int N, int... MORE>
  __device__ void multiply_by(MoeRun const& run, State& state) const {
    if constexpr (sizeof...(MORE) > 0) {
      if (run.rows > N) return multiply_by<MORE...>(run, state);
    }
    multiply<N>(run, state);
  }

  __device__ void multiply_all() const {
    State state;
    state.group = static_cast<int>(threadIdx.x) / 128 - 1;
    state.turn = state.group;
    Walk walk = this->walk();
    for (MoeRun run; walk.next(run, sharer);) {
      multiply_by<16, 48, 64, 80, 96, 112, 120, 128, 136, 144, 152, 160>(run, state);
    }
  }
};

template <class Product, int SHARERS>
__global__ void __launch_bounds__(SM90_MOE_THREADS, 1)
    sm90_moe_runs(__grid_constant__ MoeRunMaps const maps, __grid_constant__ MoeGemmArgs const g,
                  int stages) {
  extern __shared__ char dynamic[];
  uint32_t const base = ptx::shared_address(dynamic);
  uint32_t const aligned = (base + 1023) / 1024 * 1024;
  int const slabs = g.depth / SM90_MOE_K;
  uint32_t const weights = aligned + slabs * SM90_MOE_RUN_TOKENS * SM90_MOE_K * 2;
  auto& shared = *reinterpret_cast<MoeRunShared<SHARERS>*>(dynamic + (weights - base) +
                                                           stages * SM90_MOE_RUN_STAGE_BYTES);
  int const sharer = SHARERS == 1 ? 0 : cluster_rank();
  MoeRunGemm<Product, SHARERS> const gemm{maps, g, shared, aligned, weights, stages, slabs, sharer};
  if (threadIdx.x <= kMaxExpertParts) ptx::prefetch_map(&maps.weights.part[threadIdx.x]);
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; ++i) {
      ptx::barrier_init(gemm.full(i), 1);
      ptx::barrier_init(gemm.empty(i), 4 * SHARERS);
    }
    ptx::barrier_init(ptx::shared_address(&shared.tokens_full), 1);
    ptx::barrier_init(ptx::shared_address(&shared.tokens_empty), 8);
    for (uint64_t const& turn : shared.turn) ptx::barrier_init(ptx::shared_address(&turn), 4);
    ptx::barrier_init_fence();
  }
  // The lists were made before the kernel that makes the input began.
  shared.tables.fill(g.expert_begin, g.experts);
  __syncthreads();                  // barriers, tables
  if (SHARERS > 1) meet_cluster();  // barriers of the others

  if (threadIdx.x < 128) {
    ptx::registers_down<40>();
    if (threadIdx.x == 0) {
      gemm.load_weights();
    } else if (threadIdx.x == 32) {
      wait_for_previous_kernel();
      gemm.load_tokens();
    }
  } else {
    ptx::registers_up<232>();
    wait_for_previous_kernel();
    let_next_kernel_start();
    gemm.multiply_all();
  }
  if (SHARERS > 1) {  // a CTA that is gone cannot be written to
    __syncwarp();
    meet_cluster();
  }
}

template <class Product, int SHARERS>
cudaError_t launch_sm90_moe_runs(MoeParams const& p, void const* const* parts, void const* shared,
                                 MoeGemmArgs const& product, Sm90MoeWorkspace const& ws,
                                 cudaStream_t stream) {
  MoeGemmArgs g = product;
  fill_sm90_moe_gemm_args<SM90_MOE_RUN_ROWS>(g, p, ws);
  MoeRunMaps maps{};
  constexpr int BOX_ROWS = SM90_MOE_RUN_ROWS / 2;
  cudaError_t status =
      encode_sm90_moe_weights<Product, BOX_ROWS>(maps.weights, g, p, parts, shared);
  if (status != cudaSuccess) return status;
  cuuint64_t const dims[] = {static_cast<cuuint64_t>(g.depth),
                             static_cast<cuuint64_t>(p.tokens) * g.slots};
  cuuint32_t const box[] = {SM90_MOE_K, SM90_MOE_RUN_TOKENS};
  status = encode_tensor_map(maps.tokens, g.in, 2, dims, box);
  if (status != cudaSuccess) return status;

  int processors = 0;
  status = count_processors(processors);
  if (status != cudaSuccess) return status;
  int const stages = sm90_moe_run_stages(g.depth);
  auto const bytes =
      static_cast<int>(1024 + SM90_MOE_RUN_TOKENS * int64_t{g.depth} * 2 +
                       stages * SM90_MOE_RUN_STAGE_BYTES + sizeof(MoeRunShared<SHARERS>));
  auto* kernel = sm90_moe_runs<Product, SHARERS>;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status != cudaSuccess) return status;
  return launch_clusters_behind(kernel, SHARERS,
                                static_cast<unsigned>(processors / SHARERS * SHARERS),
                                SM90_MOE_THREADS, bytes, stream, maps, g, stages);
}

}  // namespace m3::kernels
