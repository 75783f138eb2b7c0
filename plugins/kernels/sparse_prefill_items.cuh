#pragma once

#include "kernels/mma_sync.cuh"
#include "kernels/sparse_prefill_plan.h"

// What the attention kernels of a sparse prefill round share.
namespace m3::kernels {

// Work of a round's items, one behind the other. A tile's is the number of its KV blocks.
struct WorkShare {
  int32_t begin, end;
};

__device__ inline WorkShare work_of_round(SparsePrefillRound const& r) {
  return {r.blocks.heads[r.first_head].work, r.blocks.heads[r.first_head + r.num_heads].work};
}
// Some of so many equal parts.
__device__ inline WorkShare share_of(WorkShare const& work, int32_t first_part, int32_t end_part,
                                     int32_t parts) {
  auto const before = [&](int64_t part) {
    return work.begin + static_cast<int32_t>((work.end - work.begin) * part / parts);
  };
  return {before(first_part), before(end_part)};
}

// The tiles of an item that begin within a share.
struct TileRange {
  int32_t begin, end;
};
__device__ inline TileRange tiles_of_share(WorkShare const& share, int32_t first_work,
                                           int32_t queries, int tile_queries, int tile_blocks) {
  int32_t const tiles = (queries + tile_queries - 1) / tile_queries;
  auto const before = [&](int32_t work) {
    return min(tiles, (max(0, work - first_work) + tile_blocks - 1) / tile_blocks);
  };
  return {before(share.begin), before(share.end)};
}

// Behind those of the round.
__device__ inline int32_t last_item(SparsePrefillRound const& r) {
  return r.blocks.heads[r.first_head + r.num_heads].items;
}

// The item that holds some work; by a warp, which looks at 32 items at a time.
__device__ inline int32_t find_item(SparsePrefillRound const& r, int32_t work) {
  int32_t low = r.blocks.heads[r.first_head].items;
  int32_t high = last_item(r);
  int const lane = threadIdx.x % 32;
  while (high - low > 1) {  // the item lies in [low, high)
    int32_t const step = (high - low + 31) / 32;
    int32_t const at = low + lane * step;
    bool const before = at < high && r.blocks.items[at].first_work <= work;
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
