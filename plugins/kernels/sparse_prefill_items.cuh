#pragma once

#include "kernels/mma_sync.cuh"
#include "kernels/sparse_prefill_plan.h"

// What the attention kernels of a sparse prefill round share.
namespace m3::kernels {

// A thread block's tiles: all blocks have equally many, in the order of the items.
struct TileShare {
  int32_t begin, end;
};

__device__ inline TileShare tile_share(SparsePrefillParams const& p, SparsePrefillRound const& r) {
  int32_t const groups = r.blocks.first_group[p.num_requests];
  int32_t const first = r.blocks.starts[r.first_head * groups].tiles;
  int64_t const tiles = r.blocks.starts[(r.first_head + r.num_heads) * groups].tiles - first;
  return {first + static_cast<int32_t>(tiles * blockIdx.x / gridDim.x),
          first + static_cast<int32_t>(tiles * (blockIdx.x + 1) / gridDim.x)};
}

// The item that holds a tile; by a warp, which looks at 32 items at a time.
__device__ inline int32_t find_item(SparsePrefillParams const& p, SparsePrefillRound const& r,
                                    int32_t tile) {
  int32_t const groups = r.blocks.first_group[p.num_requests];
  int32_t low = r.blocks.starts[r.first_head * groups].items;
  int32_t high = r.blocks.starts[(r.first_head + r.num_heads) * groups].items;
  int const lane = threadIdx.x % 32;
  while (high - low > 1) {  // the item lies in [low, high)
    int32_t const step = (high - low + 31) / 32;
    int32_t const at = low + lane * step;
    bool const before = at < high && r.blocks.items[at].first_tile <= tile;
    int const count = __popc(__ballot_sync(~0u, before));  // lane 0 always counts
    low += (count - 1) * step;
    high = min(high, low + step);
  }
  return low;
}

__device__ inline int64_t first_pair_of_head(SparsePrefillParams const& p,
                                             SparsePrefillRound const& r, int32_t head) {
  return int64_t{head - r.first_head} * r.num_tokens * p.top_k;
}

__device__ inline float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float log2_of(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Writes one of a lane's two rows, h, of a fragment [16, 128] as partial result: `out` is not yet
// divided by `sum`, which the lane has for the whole row. `unit`: the pair's eight heads.
__device__ inline void store_partial(SparsePrefillRound const& r, int group, int64_t pair, int unit,
                                     int h, float const* out, float factor, float lse) {
  int const lane = threadIdx.x % 32;
  auto* const to = static_cast<uint4*>(r.partials) +
                   (pair * (group / kUnitHeads) + unit) * (kUnitBytes / 16) + lane;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int const at = 16 * j + 4 * i + 2 * h;
      x[i] = pack_bf16(out[at] * factor, out[at + 1] * factor);
    }
    to[32 * j] = make_uint4(x[0], x[1], x[2], x[3]);
  }
  if (lane % 4 == 0) r.lse[pair * group + unit * kUnitHeads + lane / 4] = lse;
}

}  // namespace m3::kernels
