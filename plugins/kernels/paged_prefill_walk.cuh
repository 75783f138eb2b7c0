#pragma once

#include "kernels/paged_prefill_tiles.cuh"

// Which tiles a thread block of a persistent prefill kernel computes, and of which pages. kSelects:
// rows that select blocks.
namespace m3::kernels {

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
// goes backwards, so that the blocks' sums come out alike. Of joined tiles with flags a round has
// as many as there are blocks: they are shared equally, and neighbours, which chose alike, are
// computed at the same time. By a whole warp.
template <bool kSelects>
class TileWalk {
 public:
  __device__ TileWalk(PagedPrefillParams const& p, int tile_tokens)
      : p_(p), tile_tokens_(tile_tokens), end_(prefill_slots(p, tile_tokens) * p.num_kv_heads) {}

  // Without tokens behind the last tile.
  __device__ HeadTile next() {
    HeadTile tile{};
    for (;; ++round_) {
      int32_t const at = round_ % 2 != 0 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
      int32_t index = round_ * gridDim.x + at;
      bool const has_flags = kSelects && p_.joined.flags != nullptr;
      if (has_flags) index = find_joined(index);
      if (index >= end_) break;
      tile = {prefill_tile(p_, tile_tokens_, index / p_.num_kv_heads), index % p_.num_kv_heads};
      bool const counts = !kSelects || has_flags || is_in_front(p_.joined, tile.queries);
      if (tile.queries.num_tokens > 0 && counts) {
        ++round_;
        return tile;
      }
    }
    tile.queries.num_tokens = 0;
    return tile;
  }

 private:
  static constexpr int EACH = 64;  // flags of a lane

  // Bits of the lane's next flags, 0 or 1 each.
  __device__ uint64_t load_flags() const {
    uint64_t bits = 0;
#pragma unroll
    for (int i = 0; i < EACH / 16; ++i) {
      int32_t const at = first_ + EACH * static_cast<int>(threadIdx.x % 32) + 16 * i;
      if (at >= end_) continue;
      uint4 const x = *reinterpret_cast<uint4 const*>(p_.joined.flags + at);
      auto const bits_of = [](uint32_t word) { return (word & 0x01010101u) * 0x01020408u >> 24; };
      uint32_t here = bits_of(x.x) | bits_of(x.y) << 4 | bits_of(x.z) << 8 | bits_of(x.w) << 12;
      if (end_ - at < 16) here &= (1u << (end_ - at)) - 1;
      bits |= uint64_t{here} << 16 * i;
    }
    return bits;
  }

  // Index of the joined tile of this number; behind the last one: end_ or more.
  __device__ int32_t find_joined(int32_t number) {
    int const lane = threadIdx.x % 32;
    while (number >= __shfl_sync(~0u, upto_, 31)) {
      int32_t const before = __shfl_sync(~0u, upto_, 31);
      first_ += 32 * EACH;
      if (first_ >= end_) return end_;
      bits_ = load_flags();
      upto_ = __popcll(bits_);
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        int32_t const other = __shfl_up_sync(~0u, upto_, offset);
        if (lane >= offset) upto_ += other;
      }
      upto_ += before;
    }
    int const holder = __ffs(static_cast<int>(__ballot_sync(~0u, number < upto_))) - 1;
    uint64_t rest = bits_;
    int const skipped = lane == holder ? number - (upto_ - __popcll(bits_)) : 0;
    for (int i = 0; i < skipped; ++i) rest &= rest - 1;
    return __shfl_sync(~0u, first_ + EACH * lane + __ffsll(static_cast<int64_t>(rest)) - 1, holder);
  }

  PagedPrefillParams const& p_;
  int32_t tile_tokens_, end_, round_ = 0;
  int32_t first_ = -32 * EACH;  // of the flags that the lanes hold
  uint64_t bits_ = 0;
  int32_t upto_ = 0;  // joined tiles up to the lane's last flag
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
                                  int32_t (&ids)[kPrefillRows * kMaxTopK], Choice& choice) {
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
