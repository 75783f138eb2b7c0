#pragma once

#include "kernels/paged_prefill_tiles.cuh"

// Which tiles a thread block of a persistent prefill kernel computes, and of which pages. kSelects:
// rows that select blocks.
namespace m3::kernels {

constexpr int kMaxPlaces = 32;  // of a token's list of blocks

struct HeadTile {
  PrefillTile queries;
  int32_t head;  // KV head
};

// The blocks that the rows of a tile chose, the last one first.
struct Choice {
  int32_t count;
  uint32_t whole;  // bit i: all rows chose blocks[i]
  int32_t blocks[kMaxJoined];
  uint32_t tokens[kMaxJoined][kPrefillRows / 32];  // which chose the block
};

template <bool kSelects>
__device__ int count_pages(PagedPrefillParams const& p, HeadTile const& tile) {
  int const count = (tile.queries.length() + kBlockSize - 1) / kBlockSize;
  return kSelects ? min(count, p.tokens.max_pages) : count;
}

// The tiles of a block, those with most keys first, of neighbouring KV heads. Every second round
// goes backwards, so that the blocks' sums come out alike. By a whole warp.
template <bool kSelects>
class TileWalk {
 public:
  __device__ TileWalk(PagedPrefillParams const& p, int tile_tokens)
      : p_(p), tile_tokens_(tile_tokens), end_(prefill_slots(p, tile_tokens) * p.num_kv_heads) {}

  // Without tokens behind the last tile.
  __device__ HeadTile next() {
    HeadTile tile{};
    while (find_round()) {
      int32_t const index = index_of(round_ + __ffs(static_cast<int>(found_)) - 1);
      found_ &= found_ - 1;
      int32_t const slot = index / p_.num_kv_heads;
      tile = {prefill_tile(p_, tile_tokens_, slot), index % p_.num_kv_heads};
      bool const counts =
          !kSelects || is_joined(p_.joined, tile.queries, slot, tile.head, p_.num_kv_heads);
      if (tile.queries.num_tokens > 0 && counts) return tile;
    }
    tile.queries.num_tokens = 0;
    return tile;
  }

 private:
  __device__ bool may_exist(int32_t index) const {
    return index < end_ && (!kSelects || p_.joined.flags == nullptr || p_.joined.flags[index] != 0);
  }

  __device__ int32_t index_of(int32_t round) const {
    int32_t const at = round % 2 != 0 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    return start_ + round * gridDim.x + at;
  }

  // Rounds begin with the first joined tile: the long ones of a prompt are then shared equally.
  __device__ void find_start() {
    constexpr int EACH = sizeof(uint4);  // flags of a lane
    int const lane = threadIdx.x % 32;
    constexpr int DEPTH = 4;  // loads of a lane under way at once
    auto const load = [&](int32_t at) {
      return at < end_ ? *reinterpret_cast<uint4 const*>(p_.joined.flags + at) : uint4{};
    };
    bool is_close = false;
    while (!is_close && start_ < end_) {
      uint32_t any = 0;
#pragma unroll
      for (int i = 0; i < DEPTH; ++i) {
        uint4 const x = load(start_ + EACH * (32 * i + lane));
        any |= x.x | x.y | x.z | x.w;
      }
      is_close = __any_sync(~0u, any != 0);
      if (!is_close) start_ += EACH * 32 * DEPTH;
    }
    while (start_ < end_) {
      uint4 const x = load(start_ + EACH * lane);
      uint32_t const found = __ballot_sync(~0u, (x.x | x.y | x.z | x.w) != 0);
      if (found != 0) {
        uint64_t const low = uint64_t{x.y} << 32 | x.x, high = uint64_t{x.w} << 32 | x.z;
        int const place = low != 0 ? __ffsll(low) - 1 : 63 + __ffsll(high);
        int const first = __ffs(static_cast<int>(found)) - 1;
        start_ += EACH * first + __shfl_sync(~0u, place / 8, first);
        return;
      }
      start_ += EACH * 32;
    }
  }

  // Looks at 32 rounds at once, so that few joined tiles are found soon.
  __device__ bool find_round() {
    if (kSelects && round_ < 0 && p_.joined.flags != nullptr) find_start();
    while (found_ == 0) {
      round_ += 32;
      if (start_ + round_ * static_cast<int32_t>(gridDim.x) >= end_) return false;
      found_ = __ballot_sync(~0u, may_exist(index_of(round_ + static_cast<int>(threadIdx.x % 32))));
    }
    return true;
  }

  PagedPrefillParams const& p_;
  int32_t tile_tokens_, end_, start_ = 0, round_ = -32;
  uint32_t found_ = 0;  // bit i: round_ + i has a tile
};

// A warp: lists the blocks up to `last`, which comes first whether it is chosen or not: who clears
// its unused slots expects it. Here blocks are the bits of a word.
__device__ inline void choose_near(PagedPrefillParams const& p, HeadTile const& tile, int32_t last,
                                   Choice& choice) {
  int const lane = threadIdx.x % 32;
  uint32_t any = 1u << last, all = ~0u;
  uint32_t tokens[kPrefillRows / 32] = {};  // that chose the lane's block
#pragma unroll
  for (int w = 0; w < kPrefillRows / 32; ++w) {
    int const count = min(32, tile.queries.num_tokens - 32 * w);
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
      int const token = 32 * w + i;
      int32_t const block =
          lane < p.top_k ? chosen_block(p, tile.queries, tile.head, token, lane) : -1;
      uint32_t const chosen = __reduce_or_sync(~0u, block < 0 ? 0 : 1u << block);
      any |= chosen;
      all &= chosen;
      tokens[w] |= (chosen >> lane & 1) << i;
    }
  }
  int const place = __popc(any >> lane >> 1);
  bool const is_listed = (any >> lane & 1) != 0, is_whole = (all >> lane & 1) != 0;
  if (is_listed) {
    choice.blocks[place] = lane;
#pragma unroll
    for (int w = 0; w < kPrefillRows / 32; ++w) choice.tokens[place][w] = tokens[w];
  }
  uint32_t const whole = __reduce_or_sync(~0u, is_listed && is_whole ? 1u << place : 0);
  if (lane == 0) choice.count = __popc(any), choice.whole = whole;
}

// The same for any blocks, one after another.
__device__ inline void choose_far(PagedPrefillParams const& p, HeadTile const& tile, int32_t last,
                                  int32_t (&ids)[kPrefillRows * kMaxPlaces], Choice& choice) {
  int const lane = threadIdx.x % 32;
  int const count = tile.queries.num_tokens * p.top_k;
  for (int i = lane; i < count; i += 32) {
    int const token = i / p.top_k;
    ids[i] = chosen_block(p, tile.queries, tile.head, token, i % p.top_k) * kPrefillRows + token;
  }
  auto* const tokens = &choice.tokens[0][0];
  for (int i = lane; i < kMaxJoined * kPrefillRows / 32; i += 32) tokens[i] = 0;
  __syncwarp();
  uint32_t whole = 0;
  int32_t block = last;
  int place = 0;
  for (; block >= 0 && place < kMaxJoined; ++place) {
    int32_t before = -1;
    int chose = 0;
    for (int i = lane; i < count; i += 32) {
      int32_t const id = ids[i] - block * kPrefillRows;
      if (id < 0) {
        before = max(before, ids[i]);
      } else if (id < kPrefillRows) {
        atomicOr(&choice.tokens[place][id / 32], 1u << id % 32);
        ++chose;
      }
    }
    if (lane == 0) choice.blocks[place] = block;
    if (static_cast<int>(__reduce_add_sync(~0u, chose)) == tile.queries.num_tokens) {
      whole |= 1u << place;
    }
    before = __reduce_max_sync(~0u, before);
    block = before < 0 ? -1 : before / kPrefillRows;
  }
  if (lane == 0) choice.count = place, choice.whole = whole;
}

}  // namespace m3::kernels
