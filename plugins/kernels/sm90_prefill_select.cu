#include <cstdint>

#include "kernels/prefill_select_tiles.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/sm90_attention_mma.cuh"
#include "kernels/tensor_map.h"
#include "kernels/this_device.h"

namespace m3::kernels {
namespace {

constexpr int WARPGROUP = 128;
constexpr int CONSUMERS = 2;  // warpgroups of 128 query rows
constexpr int THREADS = WARPGROUP * (1 + CONSUMERS);
constexpr int STAGES = 4;
constexpr int Q_HALF = kSelectRows * 64 * 2;  // bytes of the first or last 64 channels
constexpr int K_HALF = kBlockSize * 64 * 2;
static_assert(kSelectRows == CONSUMERS * 128 && kHeadSize == 128, "two fragments of 64 rows each");

struct __align__(1024) SelectShared {
  uint8_t q[2 * Q_HALF];
  uint8_t k[STAGES][2 * K_HALF];
  uint64_t q_full, q_empty;
  uint64_t k_full[STAGES], k_empty[STAGES];
  int32_t page[STAGES];
  SelectTile tile;  // of the queries; without pages behind the last one
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Named barriers: 0 is __syncthreads.
constexpr int kTurn = 1;  // and the next

using Ring = sm90::Ring<STAGES>;

// One thread: brings each tile's queries and its pages.
__device__ void produce(BlockSelectParams const& p, CUtensorMap const& q_map,
                        CUtensorMap const& k_map, SelectShared& shared, SelectWalk& walk) {
  uint32_t const q_full = shared_address(&shared.q_full);
  uint32_t const q_empty = shared_address(&shared.q_empty);
  Ring ring;
  uint32_t q_parity = 1;
  while (walk.next()) {
    SelectTile const tile = walk.tile;
    int32_t page = page_of(p.tokens, tile.request, tile.first_page);
    sm90::barrier_wait(q_empty, q_parity);
    q_parity ^= 1;
    shared.tile = tile;
    sm90::barrier_expect(q_full, 2 * Q_HALF);
    for (int half = 0; half < 2; ++half) {
      sm90::load_tile(shared_address(shared.q) + half * Q_HALF, &q_map, q_full, half * 64, 0,
                      tile.first_token);
    }
    for (int32_t block = tile.first_page; block < tile.end_page; ++block, ring.next()) {
      int32_t const next_page = page_of(p.tokens, tile.request, block + 1);
      int const s = ring.stage;
      uint32_t const k_full = shared_address(&shared.k_full[s]);
      sm90::barrier_wait(shared_address(&shared.k_empty[s]), ring.parity ^ 1);
      shared.page[s] = page;
      sm90::barrier_expect(k_full, 2 * K_HALF);
      for (int half = 0; half < 2; ++half) {  // a page of -1 lies outside the map: zeros
        sm90::load_tile(shared_address(shared.k[s]) + half * K_HALF, &k_map, k_full, half * 64, 0,
                        page);
      }
      page = next_page;
    }
  }
  sm90::barrier_wait(q_empty, q_parity);
  shared.tile = {0, 0, 0, 0, 0};
  sm90::barrier_arrive(q_full);
}

// 64 rows of queries from `row` on, as mma's fragments.
__device__ void load_queries(uint32_t (&q)[32], SelectShared const& shared, int row, int lane) {
  uint32_t const from = shared_address(shared.q);
  int const mine = row + lane % 16;
#pragma unroll
  for (int step = 0; step < kHeadSize / 16; ++step) {
    uint32_t (&to)[4] = reinterpret_cast<uint32_t (&)[4]>(q[4 * step]);
    load_matrices(to, from + step / 4 * Q_HALF + swizzled<8>(mine, step % 4 * 2 + lane / 16));
  }
}

__device__ void multiply_keys(float (&s)[64], uint32_t const (&q)[32], uint32_t k) {
  sm90::fence();
#pragma unroll
  for (int step = 0; step < kHeadSize / 16; ++step) {
    uint32_t const at = k + step / 4 * K_HALF + step % 4 * 32;
    sm90::multiply_rows(s, q + 4 * step, sm90::row_descriptor(at), step > 0);
  }
  sm90::commit();
}

// Of the lane's columns, for its two rows. fmaxf drops a NaN.
__device__ void column_maxima(float (&largest)[2], float const (&s)[64]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = s[i / 2 * 4 + 2 * h + i % 2];
#pragma unroll
    for (int i = 4; i < 32; ++i) x[i % 4] = fmaxf(x[i % 4], s[i / 2 * 4 + 2 * h + i % 2]);
    largest[h] = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
  }
}

// A warpgroup's 128 rows. The two groups take turns, so that one's maxima are taken under the
// other's products.
__device__ void consume(BlockSelectParams const& p, SelectRound const& round,
                        SelectShared& shared) {
  int const group = threadIdx.x / WARPGROUP - 1;
  int const warp = threadIdx.x % WARPGROUP / 32, lane = threadIdx.x % 32;
  bool const leads = threadIdx.x % WARPGROUP == 0;
  int const first_row = group * 128 + warp * 16;
  Ring ring;
  uint32_t q_parity = 0;
  if (group == 1) sm90::arrive_threads(kTurn, CONSUMERS * WARPGROUP);  // the first group begins
  uint32_t q[2][32];
  float s[2][64], largest[2][2];
  while (true) {
    sm90::barrier_wait(shared_address(&shared.q_full), q_parity);
    q_parity ^= 1;
    SelectTile const tile = shared.tile;
    if (tile.first_page >= tile.end_page) return;
    load_queries(q[0], shared, first_row, lane);
    load_queries(q[1], shared, first_row + 64, lane);
    ScoreWriter writer(
        score_row(p, round, tile, first_row + lane % 4 / 2 * 64 + lane % 2 * 8 + lane / 4),
        tile.end_page);

    for (int32_t block = tile.first_page; block < tile.end_page; ++block, ring.next()) {
      sm90::barrier_wait(shared_address(&shared.k_full[ring.stage]), ring.parity);
      int32_t const page = shared.page[ring.stage];
      uint32_t const k = shared_address(shared.k[ring.stage]);
      sm90::sync_threads(kTurn + group, CONSUMERS * WARPGROUP);
      multiply_keys(s[0], q[0], k);
      multiply_keys(s[1], q[1], k);
      sm90::arrive_threads(kTurn + 1 - group, CONSUMERS * WARPGROUP);
      sm90::wait<1>();
      sm90::pin(s[0]);
      column_maxima(largest[0], s[0]);
      sm90::wait<0>();
      sm90::pin(s[1]);
      // Not earlier: until a product has used them, the queries may still be on their way to
      // registers.
      if (lane == 0 && block == tile.first_page) {
        sm90::barrier_arrive(shared_address(&shared.q_empty));
      }
      if (leads) sm90::barrier_arrive(shared_address(&shared.k_empty[ring.stage]));
      column_maxima(largest[1], s[1]);
      writer.put(block, spread_maxima(largest, lane), page >= 0);
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// Grid: a block for each multiprocessor.
__global__ void __launch_bounds__(THREADS, 1)
    score_pages_kernel(__grid_constant__ BlockSelectParams const p,
                       __grid_constant__ SelectRound const round,
                       __grid_constant__ CUtensorMap const q_map,
                       __grid_constant__ CUtensorMap const k_map) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<SelectShared*>(memory);
  if (threadIdx.x == 0) {
    sm90::barrier_init(shared_address(&shared.q_full), 1);
    sm90::barrier_init(shared_address(&shared.q_empty), CONSUMERS * WARPGROUP / 32);
    for (int s = 0; s < STAGES; ++s) {
      sm90::barrier_init(shared_address(&shared.k_full[s]), 1);
      sm90::barrier_init(shared_address(&shared.k_empty[s]), CONSUMERS);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (threadIdx.x < WARPGROUP) {
    ptx::registers_down<40>();
    if (threadIdx.x >= 32) return;
    SelectWalk walk(p, round);
    if (threadIdx.x == 0) produce(p, q_map, k_map, shared, walk);
  } else {
    ptx::registers_up<232>();
    consume(p, round, shared);
  }
#endif
}

}  // namespace

bool has_sm90_prefill_select(BlockSelectParams const& p) {
  return has_prefill_select(p.type, p.num_index_heads) && p.index_scale == nullptr &&
         p.num_pages > 0 &&  // TMA describes no empty cache
         runs_sm90(score_pages_kernel);
}

cudaError_t launch_sm90_prefill_select(BlockSelectParams const& p, void* workspace,
                                       cudaStream_t stream) {
  if (context_tokens(p) == 0) return cudaSuccess;
  if (p.index_scale != nullptr) return cudaErrorInvalidValue;
  CUtensorMap q_map, k_map;
  auto const heads = static_cast<cuuint32_t>(p.num_index_heads);
  cuuint64_t const q_dims[] = {kHeadSize, heads, static_cast<cuuint64_t>(p.tokens.num_tokens)};
  cuuint32_t const q_box[] = {64, heads, kSelectRows / heads};
  cudaError_t status = encode_tensor_map(q_map, p.index_q, 3, q_dims, q_box);
  if (status != cudaSuccess) return status;
  cuuint64_t const k_dims[] = {kHeadSize, kBlockSize, static_cast<cuuint64_t>(p.num_pages)};
  cuuint32_t const k_box[] = {64, kBlockSize, 1};
  status = encode_tensor_map(k_map, p.index_cache, 3, k_dims, k_box);
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(score_pages_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                sizeof(SelectShared));
  if (status != cudaSuccess) return status;
  int processors = 0;
  status = count_processors(processors);
  if (status != cudaSuccess) return status;
  return select_in_rounds(p, workspace, stream, [&](SelectRound const& round) {
    return launch_behind(score_pages_kernel, dim3(processors), dim3(THREADS), sizeof(SelectShared),
                         stream, p, round, q_map, k_map);
  });
}

}  // namespace m3::kernels
