#pragma once

#include "kernels/numeric.cuh"
#include "kernels/packed_tokens.cuh"
#include "kernels/smxx_paged_decode.h"

// Which keys each block of the decode kernel reads. All (query tokens, KV head) items of the step
// are cut into tiles of keys and laid end to end, and the blocks take equal shares of that line. An
// item may so be cut into pieces by several blocks, and a block leaves at most two pieces
// unfinished: one that began before its share and one that ends behind it.
namespace m3::kernels {

constexpr int kDecodeTile = 64;  // keys
constexpr int kTilesPerPage = kBlockSize / kDecodeTile;

// One KV head and up to `group_tokens` neighbouring query tokens of a request, which share its
// keys.
struct DecodeItem {
  int32_t request;
  int32_t first_token;
  int32_t num_tokens;
  int32_t length;  // keys that the last of the tokens sees
  int32_t head;
  int32_t num_tiles;
};

// Shares of `total` tiles: the first `longer` blocks get one more than the others.
struct DecodeShares {
  int32_t total, active, each, longer;

  __device__ DecodeShares(int32_t total_tiles, int32_t num_blocks)
      : total(total_tiles), active(max(1, min(num_blocks, total_tiles))) {
    each = total / active;
    longer = total - each * active;
  }
  __device__ int32_t begin(int32_t block) const {
    return block >= active ? total : block * each + min(block, longer);
  }
  __device__ int32_t block_of(int32_t tile) const {
    int32_t const border = longer * (each + 1);
    return tile < border ? tile / (each + 1) : longer + (tile - border) / each;
  }
};

// Walks over the tiles of a block. All lanes of a warp hold the same cursor and call it together.
class DecodeCursor {
 public:
  __device__ DecodeCursor(PagedDecodeParams const& p, int group_tokens)
      : p_(p), group_tokens_(group_tokens) {}

  // Tiles of the step.
  __device__ int32_t count_tiles() {
    read_ranges(0);
    int32_t sum = tiles_of(lane_range_);
    for (int32_t d = 32 + lane(); d < p_.num_decode; d += 32) sum += tiles_of(range_of(d));
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    return sum;
  }

  // To a tile that exists.
  __device__ void seek(int32_t tile) {
    for (int32_t base = 0, before = 0; base < p_.num_decode; base += 32) {
      if (base > 0) read_ranges(base);
      int32_t const tiles = tiles_of(lane_range_);
      int32_t upto = tiles;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        int32_t const left = __shfl_up_sync(~0u, upto, offset);
        if (lane() >= offset) upto += left;
      }
      unsigned const behind = __ballot_sync(~0u, before + upto > tile);
      if (behind != 0) {
        int const at = __ffs(behind) - 1;
        open_request(base + at);
        tile_ = tile - before - __shfl_sync(~0u, upto - tiles, at);
        break;
      }
      before += __shfl_sync(~0u, upto, 31);
    }
    open_item(0, 0);
    while (tile_ >= item_.num_tiles) {
      tile_ -= item_.num_tiles;
      next_item();
    }
  }

  __device__ DecodeItem const& item() const { return item_; }
  __device__ int32_t tile() const { return tile_; }  // of the item

  // To the next tile; true when it opens another item.
  __device__ bool advance() {
    if (++tile_ < item_.num_tiles) return false;
    tile_ = 0;
    next_item();
    return true;
  }

  // Behind the last item it stays where it is.
  __device__ void next_item() {
    if (item_.head + 1 < p_.num_kv_heads) {
      open_item(group_, item_.head + 1);
    } else if ((group_ + 1) * group_tokens_ < range_.count) {
      open_item(group_ + 1, 0);
    } else {
      int32_t d = decode_;
      do {
        if (++d == p_.num_decode) return;
        open_request(d);
      } while (range_.count == 0);
      open_item(0, 0);
    }
  }

 private:
  struct Range {
    int32_t first, count, length;  // tokens, and keys with them
  };

  __device__ static int lane() { return threadIdx.x % 32; }

  __device__ Range range_of(int32_t d) const {
    int32_t const request = p_.tokens.num_requests - p_.num_decode + d;
    int32_t const first = p_.tokens.cu_query_lens[request];
    int32_t const count = p_.tokens.cu_query_lens[request + 1] - first;
    return {first, max(0, min(count, p_.q_len)), p_.tokens.sequence_length[request]};
  }

  // A group of tokens without visible keys still has a tile: someone must write its zeros.
  __device__ int32_t tiles_of(int32_t length) const {
    int32_t const blocks = (length + kBlockSize - 1) / kBlockSize;
    int32_t const tiles = p_.block_ids == nullptr ? (length + kDecodeTile - 1) / kDecodeTile
                                                  : kTilesPerPage * min(blocks, p_.top_k);
    return max(1, tiles);
  }

  __device__ int32_t group_end(Range const& range, int32_t group) const {
    return min(range.count, (group + 1) * group_tokens_);
  }

  __device__ int32_t length_of(Range const& range, int32_t group) const {
    return max(0, range.length - range.count + group_end(range, group));
  }

  __device__ int32_t tiles_of(Range const& range) const {
    int32_t sum = 0;
    for (int32_t group = 0; group * group_tokens_ < range.count; ++group) {
      sum += tiles_of(length_of(range, group));
    }
    return sum * p_.num_kv_heads;
  }

  // 32 requests, one a lane.
  __device__ void read_ranges(int32_t base) {
    lane_base_ = base;
    lane_range_ = base + lane() < p_.num_decode ? range_of(base + lane()) : Range{};
  }

  __device__ void open_request(int32_t d) {
    decode_ = d;
    if (d < lane_base_ || d >= lane_base_ + 32) read_ranges(d / 32 * 32);
    int const at = d - lane_base_;
    range_ = {__shfl_sync(~0u, lane_range_.first, at), __shfl_sync(~0u, lane_range_.count, at),
              __shfl_sync(~0u, lane_range_.length, at)};
  }

  __device__ void open_item(int32_t group, int32_t head) {
    group_ = group;
    int32_t const first = group * group_tokens_;
    item_.request = p_.tokens.num_requests - p_.num_decode + decode_;
    item_.first_token = range_.first + first;
    item_.num_tokens = group_end(range_, group) - first;
    item_.length = length_of(range_, group);
    item_.head = head;
    item_.num_tiles = tiles_of(item_.length);
  }

  PagedDecodeParams const& p_;
  int32_t group_tokens_;
  int32_t lane_base_;
  Range lane_range_;
  int32_t decode_ = 0, group_ = 0, tile_ = 0;
  Range range_{};
  DecodeItem item_{};
};

}  // namespace m3::kernels
