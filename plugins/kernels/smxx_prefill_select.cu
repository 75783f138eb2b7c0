#include "kernels/mma_sync.cuh"
#include "kernels/prefill_select_tiles.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/this_device.h"
#include "kernels/vectors.cuh"

namespace m3::kernels {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int M = kSelectRows / WARPS / 16;  // row fragments of a warp
constexpr int KEYS = 64;                     // of a tile
constexpr int TILES = kBlockSize / KEYS;     // of a page
constexpr int CHUNKS = kHeadSize / 8;        // 16-byte chunks of a bf16 row
constexpr int STEPS = kHeadSize / 16;
static_assert(M == 2, "spread_maxima takes two fragments");

// Tiles as they lie in the cache; e4m3 ones are converted to a further tile.
template <class C>
struct __align__(128) SelectShared {
  static constexpr bool kConverts = sizeof(C) == 1;
  static constexpr int TILE = KEYS * kHeadSize * sizeof(C);
  static constexpr int STAGES = kConverts ? 4 : 3;
  static constexpr int CONVERTED = STAGES * TILE;  // where that one begins
  uint8_t memory[CONVERTED + (kConverts ? 2 * TILE : 0)];
};

// A warp's 32 rows of queries, as mma's fragments; rows that do not exist repeat the last one.
__device__ void load_queries(BlockSelectParams const& p, SelectTile const& tile, int first_row,
                             int lane, uint32_t (&q)[M][STEPS][4]) {
  int const last = tile.num_tokens * p.num_index_heads - 1;
  auto const* const from = static_cast<Bf16 const*>(p.index_q) +
                           int64_t{tile.first_token} * p.num_index_heads * kHeadSize + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int64_t const row = min(first_row + m * 16 + h * 8 + lane / 4, last);
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        auto const* const at =
            reinterpret_cast<uint32_t const*>(from + row * kHeadSize + step * 16);
        q[m][step][h] = at[0];
        q[m][step][2 + h] = at[4];
      }
    }
  }
}

template <class C>
__device__ void load_keys(uint32_t to, C const* page, int first) {
  constexpr int PER_ROW = kHeadSize * sizeof(C) / 16;
  auto const* const from = reinterpret_cast<uint8_t const*>(page + first * kHeadSize);
#pragma unroll
  for (int i = threadIdx.x; i < KEYS * PER_ROW; i += THREADS) {
    copy_async(to + swizzled<PER_ROW>(i / PER_ROW, i % PER_ROW), from + i * 16, true);
  }
}

// Of e4m3 keys, exactly; by all threads.
__device__ void convert_keys(uint8_t* to, uint8_t const* from) {
#pragma unroll
  for (int i = threadIdx.x; i < KEYS * CHUNKS; i += THREADS) {
    int const row = i / CHUNKS, chunk = i % CHUNKS;
    auto const* const keys = reinterpret_cast<__nv_fp8_e4m3 const*>(
        from + swizzled<CHUNKS / 2>(row, chunk / 2) + chunk % 2 * 8);
    float4 const a = load4(keys), b = load4(keys + 4);
    *reinterpret_cast<uint4*>(to + swizzled<CHUNKS>(row, chunk)) = make_uint4(
        pack_bf16(a.x, a.y), pack_bf16(a.z, a.w), pack_bf16(b.x, b.y), pack_bf16(b.z, b.w));
  }
}

// Raises `largest`, of the lane's four rows and its columns, by a tile's scores.
__device__ void score_tile(uint32_t keys, uint32_t const (&q)[M][STEPS][4], int lane,
                           float (&largest)[M][2]) {
  float s[M][KEYS / 8][4] = {};
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
#pragma unroll
    for (int n = 0; n < KEYS / 16; ++n) {
      uint32_t b[4];
      load_matrices(
          b, keys + swizzled<CHUNKS>(n * 16 + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
#pragma unroll
      for (int m = 0; m < M; ++m) {
        multiply_add(s[m][2 * n], q[m][step], b[0], b[1]);
        multiply_add(s[m][2 * n + 1], q[m][step], b[2], b[3]);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) largest[m][i / 2] = fmaxf(largest[m][i / 2], s[m][n][i]);
    }
  }
}

template <class C>
__device__ void score_pages(BlockSelectParams const& p, SelectRound const& round,
                            SelectTile const& tile, SelectShared<C>& shared) {
  using Shared = SelectShared<C>;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int const end = tile.end_page * TILES;
  auto const load = [&](int t) {
    int32_t const page = t < end ? page_of(p.tokens, tile.request, t / TILES) : -1;
    if (page >= 0) {
      load_keys(shared_address(shared.memory) + t % Shared::STAGES * Shared::TILE,
                static_cast<C const*>(p.index_cache) + int64_t{page} * kBlockSize * kHeadSize,
                t % TILES * KEYS);
    }
    commit_copies();
  };
  int const first = tile.first_page * TILES;
  for (int t = first; t < first + Shared::STAGES - 1; ++t) load(t);
  uint32_t q[M][STEPS][4];
  load_queries(p, tile, warp * 16 * M, lane, q);
  ScoreWriter writer(
      score_row(p, round, tile, warp * 16 * M + lane % 4 / 2 * 16 + lane % 2 * 8 + lane / 4),
      tile.end_page);
  float const scale = Shared::kConverts ? *p.index_scale : 1.f;
  for (int32_t block = tile.first_page; block < tile.end_page; ++block) {
    float largest[M][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}};
    for (int part = 0; part < TILES; ++part) {
      int const t = block * TILES + part;
      wait_copies<Shared::STAGES - 2>();
      __syncthreads();  // tile t is here, and every warp is done with the one before
      load(t + Shared::STAGES - 1);
      uint8_t* keys = shared.memory + t % Shared::STAGES * Shared::TILE;
      if constexpr (Shared::kConverts) {
        convert_keys(shared.memory + Shared::CONVERTED, keys);
        keys = shared.memory + Shared::CONVERTED;
        __syncthreads();
      }
      score_tile(shared_address(keys), q, lane, largest);
    }
    writer.put(block, spread_maxima(largest, lane) * scale,
               page_of(p.tokens, tile.request, block) >= 0);
  }
  wait_copies<0>();
  __syncthreads();  // every warp is done with the last tiles
}

// Grid: as many blocks as run at once.
template <class C>
__global__ void __launch_bounds__(THREADS)
    score_pages_kernel(__grid_constant__ BlockSelectParams const p,
                       __grid_constant__ SelectRound const round) {
  extern __shared__ __align__(128) uint8_t memory[];
  wait_for_previous_kernel();
  let_next_kernel_start();
  SelectWalk walk(p, round);
  while (walk.next()) {
    score_pages(p, round, walk.tile, *reinterpret_cast<SelectShared<C>*>(memory));
  }
}

template <class C>
cudaError_t launch(BlockSelectParams const& p, void* workspace, cudaStream_t stream) {
  int processors = 0, blocks = 0;
  constexpr size_t bytes = sizeof(SelectShared<C>);
  static_assert(bytes <= 48 << 10, "more would have to be asked for");
  cudaError_t status = count_processors(processors);
  if (status != cudaSuccess) return status;
  status =
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, score_pages_kernel<C>, THREADS, bytes);
  if (status != cudaSuccess) return status;
  return select_in_rounds(p, workspace, stream, [&](SelectRound const& round) {
    return launch_behind(score_pages_kernel<C>, dim3(processors * blocks), dim3(THREADS), bytes,
                         stream, p, round);
  });
}

}  // namespace

cudaError_t launch_smxx_prefill_select(BlockSelectParams const& p, void* workspace,
                                       cudaStream_t stream) {
  if (context_tokens(p) == 0) return cudaSuccess;
  return p.index_scale == nullptr ? launch<Bf16>(p, workspace, stream)
                                  : launch<__nv_fp8_e4m3>(p, workspace, stream);
}

}  // namespace m3::kernels
