#include "kernels/numeric.cuh"
#include "kernels/smxx_moe_stages.h"

namespace m3::kernels {
namespace {

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

// Block e lists the pairs of expert e in ascending order. Its first place is the number of pairs
// with a lower expert, which it counts itself: no atomics, so the order never varies.
__global__ void __launch_bounds__(THREADS)
    moe_permute(int32_t const* __restrict__ expert_ids, int64_t pairs, int32_t experts,
                int32_t* __restrict__ sorted_pairs, int32_t* __restrict__ expert_begin) {
  __shared__ int lower_counts[WARPS];
  __shared__ int warp_counts[WARPS];
  int const expert = blockIdx.x;
  int const warp = threadIdx.x / 32;
  int const lane = threadIdx.x % 32;

  int lower = 0;
  for (int64_t i = threadIdx.x; i < pairs; i += THREADS) {
    int const id = expert_ids[i];
    lower += id >= 0 && id < expert;
  }
  lower = __reduce_add_sync(~0u, lower);
  if (lane == 0) lower_counts[warp] = lower;
  __syncthreads();  // lower_counts
  int place = 0;
  for (int w = 0; w < WARPS; ++w) place += lower_counts[w];
  if (threadIdx.x == 0) expert_begin[expert] = place;

  for (int64_t start = 0; start < pairs; start += THREADS) {
    int64_t const i = start + threadIdx.x;
    bool const mine = i < pairs && expert_ids[i] == expert;
    unsigned const ballot = __ballot_sync(~0u, mine);
    if (lane == 0) warp_counts[warp] = __popc(ballot);
    __syncthreads();  // warp_counts of this round are written
    int before = 0;
    int total = 0;
    for (int w = 0; w < WARPS; ++w) {
      before += w < warp ? warp_counts[w] : 0;
      total += warp_counts[w];
    }
    if (mine) {
      sorted_pairs[place + before + __popc(ballot & ((1u << lane) - 1))] = static_cast<int32_t>(i);
    }
    place += total;
    __syncthreads();  // warp_counts are read before the next round overwrites them
  }
  if (threadIdx.x == 0 && expert == experts - 1) expert_begin[experts] = place;
}

// Cuts each expert's run into tiles: the work list of the grouped GEMMs. One block.
__global__ void __launch_bounds__(kMaxExperts)
    moe_tiles(int32_t const* __restrict__ expert_begin, int32_t experts, int64_t max_tiles,
              MoeTile* __restrict__ tiles) {
  __shared__ int first_tile[kMaxExperts + 1];  // first each expert's number of tiles
  int const e = threadIdx.x;
  if (e < experts) {
    int const pairs = expert_begin[e + 1] - expert_begin[e];
    first_tile[e] = (pairs + MOE_TILE_ROWS - 1) / MOE_TILE_ROWS;
  }
  __syncthreads();  // the numbers
  if (e == 0) {
    int count = 0;
    for (int i = 0; i < experts; ++i) {
      int const tiles_of_expert = first_tile[i];
      first_tile[i] = count;
      count += tiles_of_expert;
    }
    first_tile[experts] = count;
  }
  __syncthreads();  // first_tile
  if (e < experts) {
    for (int t = first_tile[e]; t < first_tile[e + 1]; ++t) {
      int const first = expert_begin[e] + (t - first_tile[e]) * MOE_TILE_ROWS;
      tiles[t] = {e, first, min(first + MOE_TILE_ROWS, expert_begin[e + 1])};
    }
  }
  for (int64_t t = first_tile[experts] + threadIdx.x; t < max_tiles; t += blockDim.x) {
    tiles[t] = {-1, 0, 0};
  }
}

}  // namespace

cudaError_t launch_moe_permute(MoeParams const& p, MoeWorkspace const& ws, cudaStream_t stream) {
  moe_permute<<<p.experts, THREADS, 0, stream>>>(ws.expert_ids, p.tokens * p.top_k, p.experts,
                                                 ws.sorted_pairs, ws.expert_begin);
  if (cudaError_t const status = cudaGetLastError(); status != cudaSuccess) return status;
  moe_tiles<<<1, kMaxExperts, 0, stream>>>(ws.expert_begin, p.experts, moe_max_tiles(p), ws.tiles);
  return cudaGetLastError();
}

}  // namespace m3::kernels
