#pragma once

#include "kernels/mma_sync.cuh"
#include "kernels/packed_tokens.cuh"
#include "kernels/smxx_select_top.h"

// Which pages the blocks of a scoring kernel score for which query rows, and how they write it.
//
// A query's own block is always selected, and all keys of the blocks before it are visible. So a
// tile scores the whole pages in front of its last token's own block, without any mask; rows whose
// own block is among them get scores that nobody reads.
namespace m3::kernels {

constexpr int kGroupsPerChunk = 8;  // groups of kPagesPerStore pages that tiles take turns at

// The pages [first_page, end_page) of a request for the rows (token, index head) of some tokens.
struct SelectTile {
  int32_t request;
  int32_t first_token;
  int32_t num_tokens;
  int32_t first_page;
  int32_t end_page;
};

// The tokens of a request that need scores, and how many groups of pages their tiles have: a
// staircase, group_count(t) = (start + t) / 2^shift, except that a last tile may have fewer.
class SelectRequest {
 public:
  int32_t first_token = 0;
  int32_t num_tokens = 0;
  int32_t first_position = 0;

  __device__ SelectRequest() {}
  __device__ SelectRequest(BlockSelectParams const& p, SelectRound const& round, int log_tokens,
                           int32_t request) {
    int32_t const* __restrict__ const cu = p.tokens.cu_query_lens;
    int32_t const end = min(cu[request + 1], round.end);
    first_token = max(cu[request], round.first);
    first_position = p.tokens.sequence_length[request] - (cu[request + 1] - first_token);
    // Up to here a query sees no more than top_k blocks.
    int32_t const all_taken = p.top_k * kBlockSize - first_position;
    int32_t const skipped = all_taken > 0 ? all_taken >> log_tokens << log_tokens : 0;
    first_token += skipped;
    first_position += skipped;
    num_tokens = first_position + end - first_token > p.top_k * kBlockSize ? end - first_token : 0;
    num_tokens = max(num_tokens, 0);
    log_tokens_ = log_tokens;
    shift_ = 9 - log_tokens;  // 512 positions are a group
    start_ = (first_position + (1 << log_tokens) + 3 * kBlockSize - 1) >> log_tokens;
  }

  __device__ int32_t num_tiles() const {
    return (num_tokens + (1 << log_tokens_) - 1) >> log_tokens_;
  }
  __device__ int32_t group_count(int32_t tile) const { return (start_ + tile) >> shift_; }
  // First tile with more groups than that.
  __device__ int32_t first_above(int32_t groups) const {
    return max(0, ((groups + 1) << shift_) - start_);
  }
  // Groups of the first `tiles` tiles, of each only the first `limit`.
  __device__ int32_t groups_before(int32_t tiles, int32_t limit) const {
    int32_t const rising = min(max((limit << shift_) - start_, 0), tiles);
    return stairs(start_ + rising) - stairs(start_) + limit * (tiles - rising);
  }
  __device__ int32_t all_groups() const {
    return num_tokens == 0 ? 0 : groups_before(num_tiles(), group_count(num_tiles()));
  }

 private:
  // Sum of i / 2^shift over i < n.
  __device__ int32_t stairs(int32_t n) const {
    int32_t const steps = n >> shift_;
    return (steps * (steps - 1) / 2 << shift_) + steps * (n - (steps << shift_));
  }

  int32_t log_tokens_ = 0;
  int32_t shift_ = 0;
  int32_t start_ = 0;
};

// The work of a block. All groups of pages of all tiles stand in a row: request by request, chunk
// of pages by chunk of pages, tile by tile. The row is cut into equal pieces, some for each block,
// which the blocks take side by side: so they share the pages in L2 and end together.
class SelectWalk {
 public:
  // By a whole warp.
  __device__ SelectWalk(BlockSelectParams const& p, SelectRound const& round)
      : p_(p), round_(round) {
    num_requests_ = p.tokens.num_requests - p.num_decode_requests;
    log_tokens_ = 31 - __clz(kSelectRows / p.num_index_heads);
    for (int32_t r = threadIdx.x % 32; r < num_requests_; r += 32) {
      total_ += SelectRequest(p, round, log_tokens_, r).all_groups();
    }
    total_ = __reduce_add_sync(~0u, total_);
    int32_t const blocks = gridDim.x;
    pieces_ = blocks * max(1, total_ / (blocks * kGroupsPerChunk));
    piece_size_ = total_ / pieces_;
    longer_pieces_ = total_ - pieces_ * piece_size_;
    piece_ = blockIdx.x;
  }

  // False behind the last tile.
  __device__ bool next() {
    do {
      while (left_ == 0) {
        if (piece_ >= pieces_) return false;
        left_ = piece_size_ + (piece_ < longer_pieces_);
        if (left_ > 0) seek(piece_ * piece_size_ + min(piece_, longer_pieces_));
        piece_ += gridDim.x;
      }
      int32_t const limit = min(of_.group_count(tile_), (chunk_ + 1) * kGroupsPerChunk);
      int32_t const taken = min(left_, limit - group_);
      describe(taken);
      left_ -= taken;
      if (left_ > 0) step();
    } while (tile.first_page >= tile.end_page);
    return true;
  }

  SelectTile tile;

 private:
  __device__ void describe(int32_t groups) {
    int32_t const token = tile_ << log_tokens_;
    tile.request = request_;
    tile.first_token = of_.first_token + token;
    tile.num_tokens = min(of_.num_tokens - token, 1 << log_tokens_);
    tile.first_page = group_ * kPagesPerStore;
    int32_t const pages = (of_.first_position + token + tile.num_tokens - 1) / kBlockSize;
    tile.end_page = min((group_ + groups) * kPagesPerStore, min(pages, p_.tokens.max_pages));
  }

  __device__ void next_request() {
    before_ += of_.all_groups();
    of_ = SelectRequest(p_, round_, log_tokens_, ++request_);
  }

  // To group `at` of the row, at or behind the current request.
  __device__ void seek(int32_t at) {
    while (at - before_ >= of_.all_groups()) next_request();
    at -= before_;
    int32_t const tiles = of_.num_tiles();
    int32_t low = 0, high = of_.group_count(tiles - 1) / kGroupsPerChunk;
    while (low < high) {  // the last chunk that begins at or before `at`
      int32_t const middle = (low + high + 1) / 2;
      if (of_.groups_before(tiles, middle * kGroupsPerChunk) <= at) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    chunk_ = low;
    int32_t const first = chunk_ * kGroupsPerChunk;
    at -= of_.groups_before(tiles, first);
    auto const before = [&](int32_t tile) {
      return of_.groups_before(tile, first + kGroupsPerChunk) - of_.groups_before(tile, first);
    };
    low = 0, high = tiles - 1;
    while (low < high) {  // and the last such tile in it
      int32_t const middle = (low + high + 1) / 2;
      if (before(middle) <= at) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    tile_ = low;
    group_ = first + at - before(low);
  }

  // To the first group of the next tile, chunk or request.
  __device__ void step() {
    if (++tile_ >= of_.num_tiles()) {
      ++chunk_;
      tile_ = of_.first_above(chunk_ * kGroupsPerChunk);
      if (tile_ >= of_.num_tiles()) {
        do next_request();
        while (of_.num_tokens == 0);
        chunk_ = 0;
        tile_ = 0;
      }
    }
    group_ = chunk_ * kGroupsPerChunk;
  }

  BlockSelectParams const& p_;
  SelectRound const& round_;
  SelectRequest of_;
  int32_t num_requests_, log_tokens_, total_ = 0;
  int32_t pieces_, piece_, piece_size_, longer_pieces_;
  int32_t request_ = -1, before_ = 0;  // the current request, groups of those in front of it
  int32_t chunk_ = 0, tile_ = 0, group_ = 0, left_ = 0;
};

// Lane i of four gets the largest x[i / 2][i % 2] of all four.
__device__ inline float spread_maxima(float const (&x)[2][2], int lane) {
  float y[2];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    float const other = __shfl_xor_sync(~0u, lane % 2 == 0 ? x[m][1] : x[m][0], 1);
    y[m] = fmaxf(lane % 2 == 0 ? x[m][0] : x[m][1], other);
  }
  float const other = __shfl_xor_sync(~0u, lane % 4 < 2 ? y[1] : y[0], 2);
  return fmaxf(lane % 4 < 2 ? y[0] : y[1], other);
}

// Scores of a row, page after page.
class ScoreWriter {
 public:
  // `to`: null for a row that does not exist.
  __device__ ScoreWriter(float* to, int32_t end_page) : to_(to), end_page_(end_page) {}

  // A score that is NaN, or of a page that does not exist, loses to every number.
  __device__ void put(int32_t page, float score, bool exists) {
    held_ = {held_.y, held_.z, held_.w, exists ? fmaxf(score, -INFINITY) : -INFINITY};
    bool const last = page + 1 == end_page_;
    if (last) {
      for (int i = page; i % kPagesPerStore != kPagesPerStore - 1; ++i) {
        held_ = {held_.y, held_.z, held_.w, held_.w};
      }
    }
    if ((last || page % kPagesPerStore == kPagesPerStore - 1) && to_ != nullptr) {
      *reinterpret_cast<float4*>(to_ + page / kPagesPerStore * kPagesPerStore) = held_;
    }
  }

 private:
  float* to_;
  int32_t end_page_;
  float4 held_ = {};
};

__device__ inline float* score_row(BlockSelectParams const& p, SelectRound const& round,
                                   SelectTile const& tile, int row) {
  if (row >= tile.num_tokens * p.num_index_heads) return nullptr;
  int64_t const first = int64_t{tile.first_token - round.first} * p.num_index_heads;
  return round.scores + (first + row) * round.pitch;
}

}  // namespace m3::kernels
