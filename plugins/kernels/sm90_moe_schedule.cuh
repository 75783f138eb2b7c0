#pragma once

#include "kernels/sm90_moe_stages.h"

// Which CTA computes what. A tile is 256 weight rows by up to 160 rows of one expert; tiles are
// numbered with the token tiles of one weight tile side by side, so that CTAs which run at the same
// time share weights in L2, and the shared expert, which has the most, first.
namespace m3::kernels {

constexpr int SM90_MOE_K = 64;  // of one pipeline stage

// A part of one tile: stages k0 .. k1 - 1 of its K. first_cta .. last_cta compute the whole tile.
struct MoeSegment {
  int tile, k0, k1;
  int first_cta, last_cta;
};

// Waves of whole tiles, then, where that evens the load, the last one or two waves cut along K.
class MoeSchedule {
 public:
  __device__ MoeSchedule(int tiles, int depth, int cta, int ctas)
      : depth_(depth), cta_(cta), ctas_(ctas), next_(cta) {
    constexpr int SPLIT_COST = 3;  // stages that adding up partial sums takes
    int const waves = (tiles + ctas - 1) / ctas;
    bool const cut = waves * depth * ctas > tiles * depth + SPLIT_COST * ctas;
    whole_ = cut ? max(0, tiles / ctas - 1) * ctas : tiles;
    units_ = (tiles - whole_) * depth;
    sharers_ = max(1, min(ctas, units_ / 2));  // every one gets something
    unit_ = begin(min(cta, sharers_));
    end_ = begin(min(cta + 1, sharers_));
  }

  __device__ bool next(MoeSegment& s) {
    if (next_ < whole_) {
      s = {next_, 0, depth_, cta_, cta_};
      next_ += ctas_;
      return true;
    }
    if (unit_ >= end_) return false;
    int const tile = unit_ / depth_;
    s.tile = whole_ + tile;
    s.k0 = unit_ - tile * depth_;
    s.k1 = min(depth_, s.k0 + end_ - unit_);
    s.first_cta = owner(tile * depth_);
    s.last_cta = owner((tile + 1) * depth_ - 1);
    unit_ += s.k1 - s.k0;
    return true;
  }

 private:
  __device__ int begin(int cta) const {
    return static_cast<int>(int64_t{cta} * units_ / sharers_);
  }
  // The last cta whose range begins at or before `unit`
  __device__ int owner(int unit) const {
    auto cta = static_cast<int>(int64_t{unit} * sharers_ / units_);
    while (begin(cta + 1) <= unit) ++cta;
    return cta;
  }

  int depth_, cta_, ctas_, next_, whole_;
  int units_, sharers_, unit_, end_;  // stages of the tiles that are cut, who cuts, my range
};

// The rows of a tile.
struct MoeTokens {
  int expert;       // number `experts` is the shared one
  int weight_tile;  // counts SM90_MOE_WEIGHT_ROWS
  int place, rows;  // first place, number of rows
};

// Prefix sums of the experts' token tiles, in shared memory: entry 0 is the shared expert's start.
class MoeTiles {
 public:
  // One warp fills `prefix` [experts + 2].
  __device__ static void count(int32_t const* expert_begin, int experts, int* prefix) {
    int const lane = threadIdx.x % 32;
    int total = 0;
    for (int first = 0; first <= experts; first += 32) {
      int const i = first + lane;
      int tiles = 0;
      if (i <= experts) {
        int const expert = i == 0 ? experts : i - 1;
        int const rows = expert_begin[expert + 1] - expert_begin[expert];
        tiles = (rows + SM90_MOE_MAX_TOKENS - 1) / SM90_MOE_MAX_TOKENS;
      }
      int sum = tiles;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        int const other = __shfl_up_sync(~0u, sum, offset);
        if (lane >= offset) sum += other;
      }
      if (i <= experts) prefix[i] = total + sum - tiles;
      total += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) prefix[experts + 1] = total;
  }

  __device__ static MoeTokens find(int tile, int const* prefix, int32_t const* expert_begin,
                                   int experts, int weight_tiles) {
    int low = 0;
    int high = experts + 1;
    while (high - low > 1) {
      int const middle = (low + high) / 2;
      (prefix[middle] * weight_tiles <= tile ? low : high) = middle;
    }
    // Several entries can share a start when experts are empty; `low` is the last, which has tiles.
    int const token_tiles = prefix[low + 1] - prefix[low];
    int const local = tile - prefix[low] * weight_tiles;
    MoeTokens t;
    t.expert = low == 0 ? experts : low - 1;
    t.weight_tile = local / token_tiles;
    int const begin = expert_begin[t.expert];
    int const rows = expert_begin[t.expert + 1] - begin;
    int const each = ((rows + token_tiles - 1) / token_tiles + 7) / 8 * 8;
    int const first = local % token_tiles * each;
    t.place = begin + first;
    t.rows = min(each, rows - first);
    return t;
  }
};

}  // namespace m3::kernels
