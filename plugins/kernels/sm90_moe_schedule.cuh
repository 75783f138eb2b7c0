#pragma once

#include "kernels/sm90_moe_stages.h"

// Which CTA computes what. A tile is 256 weight rows by up to 160 rows of one expert; tiles are
// numbered with the token tiles of one weight tile side by side, so that CTAs which run at the same
// time share weights in L2, and the shared expert, which has the most, first.
namespace m3::kernels {

constexpr int SM90_MOE_K = 64;  // of one pipeline stage

// a / b where 0 <= a and the quotient is below 2^22, in short code: a kernel's first weights wait
// for it, and between two steps the code leaves the caches.
__device__ inline int divided(int a, int b) {
  float inverse;
  asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(static_cast<float>(b)));
  auto quotient = static_cast<int>(static_cast<float>(a) * inverse);
  int const rest = a - quotient * b;
  if (rest < 0) --quotient;
  if (rest >= b) ++quotient;
  return quotient;
}

// A part of one tile: stages k0 .. k1 - 1 of its K. first_cta .. last_cta compute the whole tile.
struct MoeSegment {
  int tile, k0, k1;
  int first_cta, last_cta;
};

// Waves of whole tiles, then, where that evens the load, the last one or two waves cut along K. Or,
// with tickets, one wave and then the next tile for whoever comes next.
class MoeSchedule {
 public:
  __device__ MoeSchedule(int tiles, int depth, int cta, int ctas, bool tickets)
      : depth_(depth), cta_(cta), ctas_(ctas), next_(cta), tiles_(tiles) {
    if (tickets) {
      whole_ = min(tiles, ctas);
      each_ = longer_ = unit_ = end_ = 0;
      return;
    }
    constexpr int SPLIT_COST = 3;                  // stages that adding up partial sums takes
    int const full = divided(tiles, ctas) * ctas;  // tiles of full waves
    int const idle = full == tiles ? 0 : full + ctas - tiles;
    whole_ = idle * depth > SPLIT_COST * ctas ? max(0, full - ctas) : tiles;
    int const units = (tiles - whole_) * depth;
    int const sharers = max(1, min(ctas, units / 2));  // every one gets something
    each_ = divided(units, sharers);
    longer_ = units - each_ * sharers;
    unit_ = begin(min(cta, sharers));
    end_ = begin(min(cta + 1, sharers));
  }

  __device__ bool next(MoeSegment& s) {
    if (next_ < whole_) {
      s = {next_, 0, depth_, cta_, cta_};
      next_ += ctas_;
      return true;
    }
    if (unit_ >= end_) return false;
    int const tile = divided(unit_, depth_);
    s.tile = whole_ + tile;
    s.k0 = unit_ - tile * depth_;
    s.k1 = min(depth_, s.k0 + end_ - unit_);
    s.first_cta = owner(tile * depth_);
    s.last_cta = owner((tile + 1) * depth_ - 1);
    unit_ += s.k1 - s.k0;
    return true;
  }

  // Once next has found the end
  __device__ bool take(int ticket, MoeSegment& s) const {
    s = {whole_ + ticket, 0, depth_, cta_, cta_};
    return s.tile < tiles_;
  }

 private:
  // The first `longer_` CTAs have one unit, a stage of the tiles that are cut, more than others.
  __device__ int begin(int cta) const { return cta * each_ + min(cta, longer_); }
  __device__ int owner(int unit) const {
    int const others = unit - longer_ * (each_ + 1);
    return others < 0 ? divided(unit, each_ + 1) : longer_ + divided(others, each_);
  }

  int depth_, cta_, ctas_, next_, tiles_, whole_;
  int each_, longer_, unit_, end_;
};

// One CTA's share of a tile.
struct MoeTokens {
  int expert;       // number `experts` is the shared one
  int weight_tile;  // counts SM90_MOE_WEIGHT_ROWS
  int place, rows;  // first place, number of rows
  bool alone;       // nobody reads the same weights later
};

// prefix[i] = value(0) + .. + value(i - 1) for i up to `count`, by the block's first warp.
template <class Value>
__device__ void prefix_sums(int count, int* prefix, Value const& value) {
  if (threadIdx.x >= 32) return;
  int const lane = threadIdx.x;
  int total = 0;
  for (int first = 0; first < count; first += 32) {
    int const i = first + lane;
    int const mine = i < count ? value(i) : 0;
    int sum = mine;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      int const other = __shfl_up_sync(~0u, sum, offset);
      if (lane >= offset) sum += other;
    }
    if (i < count) prefix[i] = total + sum - mine;
    total += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) prefix[count] = total;
}

// Tables in shared memory, by which a CTA finds the rows of a tile. SHARERS CTAs of a cluster take
// a tile together: the same weights, each a part of its tokens.
template <int TOKENS, int SHARERS>
struct MoeTiles {
  int begin[kMaxExperts + 2];   // first place of each expert
  int prefix[kMaxExperts + 2];  // token tiles before: entry 0 is the shared expert, e + 1 expert e

  // All threads of the block
  __device__ void fill(int32_t const* expert_begin, int experts) {
    constexpr int CAPACITY = SHARERS * TOKENS;
    for (int i = threadIdx.x; i < experts + 2; i += blockDim.x) begin[i] = expert_begin[i];
    __syncthreads();  // begin
    prefix_sums(experts + 1, prefix, [&](int i) {
      int const expert = i == 0 ? experts : i - 1;
      return (begin[expert + 1] - begin[expert] + CAPACITY - 1) / CAPACITY;
    });
  }

  __device__ int count(int experts, int weight_tiles) const {
    return prefix[experts + 1] * weight_tiles;
  }

  __device__ int token_tiles(int expert, int experts) const {
    int const i = expert == experts ? 0 : expert + 1;
    return prefix[i + 1] - prefix[i];
  }

  // The shared expert's tiles have many tokens: they are spread among the others, which wait for
  // memory meanwhile. Tiles of the same weights lie side by side: they run at the same time and
  // share them in L2.
  __device__ MoeTokens find(int tile, int experts, int weight_tiles, int sharer) const {
    MoeTokens t;
    int const shared_tiles = prefix[1];
    int const routed = (prefix[experts + 1] - shared_tiles);  // a round: of all weight tiles
    int const round = divided(tile, shared_tiles + routed);
    int const in_round = tile - round * (shared_tiles + routed);
    int local, token_tiles;
    if (in_round < shared_tiles) {
      t.expert = experts;
      t.weight_tile = round;
      local = in_round;
      token_tiles = shared_tiles;
    } else {
      int const i = round * routed + in_round - shared_tiles;
      int low = 1;
      int high = experts + 1;
      while (high - low > 1) {
        int const middle = (low + high) / 2;
        ((prefix[middle] - shared_tiles) * weight_tiles <= i ? low : high) = middle;
      }
      // Several entries share a start when experts are empty; `low` is the last, which has tiles.
      t.expert = low - 1;
      token_tiles = prefix[low + 1] - prefix[low];
      local = i - (prefix[low] - shared_tiles) * weight_tiles;
      t.weight_tile = divided(local, token_tiles);
      local -= t.weight_tile * token_tiles;
    }
    int const rows = begin[t.expert + 1] - begin[t.expert];
    int const parts = token_tiles * SHARERS;
    int const each = (divided(rows + parts - 1, parts) + 7) / 8 * 8;
    int const first = (local * SHARERS + sharer) * each;
    t.place = begin[t.expert] + first;
    t.rows = max(0, min(each, rows - first));
    t.alone = token_tiles == 1;
    return t;
  }
};

}  // namespace m3::kernels
