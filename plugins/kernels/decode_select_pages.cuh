#pragma once

#include "kernels/packed_tokens.cuh"
#include "kernels/smxx_block_select.h"

// What the decode selection scores: the pages of all requests, end to end on a line.
namespace m3::kernels::decode_select {

// Decode requests [first, first + count) are scored and selected together.
struct Round {
  int32_t first, count;
  uint32_t* scores;      // [count, decode_length, Hi, stride], ordered_score of the floats
  int64_t score_stride;  // max_pages, a multiple of 4
  int32_t processors;
  int32_t row_warps;  // log2 of the warps that write scores of the same row
};

struct DecodeRequest {
  int32_t request;  // row of the table
  int32_t first_token, num_tokens;
  int32_t length;  // keys, this step's included

  __device__ int32_t position(int token) const { return length - num_tokens + token; }
};

__device__ inline DecodeRequest request_at(BlockSelectParams const& p, int32_t d) {
  int32_t const request = p.tokens.num_requests - p.num_decode_requests + d;
  int32_t const first = p.tokens.cu_query_lens[request];
  int32_t const tokens = p.tokens.cu_query_lens[request + 1] - first;
  return {request, first, min(tokens, p.decode_length), p.tokens.sequence_length[request]};
}

// The first blocks of the sequence, those before the last token's own. A token's own block is taken
// whatever it scores, and the blocks before it are full: no score needs a mask. Nothing is scored
// where every token takes all that it sees.
__device__ inline int32_t scored_blocks(BlockSelectParams const& p, DecodeRequest const& r) {
  int32_t const own = (r.length - 1) / kBlockSize;
  bool const sees_all = min(own + 1, p.tokens.max_pages) <= p.top_k;
  return r.num_tokens <= 0 || sees_all ? 0 : min(own, p.tokens.max_pages);
}

// Walks over the line. All lanes of a warp hold the same cursor and call it together.
class PageCursor {
 public:
  __device__ PageCursor(BlockSelectParams const& p, Round const& round) : p_(p), round_(round) {}

  __device__ int32_t count_pages() {
    int32_t sum = 0;
#pragma unroll 1
    for (int32_t base = (round_.count - 1) / 32 * 32; base >= 0; base -= 32) {
      read(base);
      sum += lane_blocks_;
    }
    return __reduce_add_sync(~0u, sum);
  }

  // To a page that exists, after count_pages.
  __device__ void seek(int32_t page) {
    if (base_ != 0) read(0);
    for (;;) {
      int32_t upto = lane_blocks_;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        int32_t const left = __shfl_up_sync(~0u, upto, offset);
        if (lane() >= offset) upto += left;
      }
      unsigned const behind = __ballot_sync(~0u, upto > page);
      if (behind != 0) {
        int const at = __ffs(behind) - 1;
        open(at);
        block_ = page - __shfl_sync(~0u, upto - lane_blocks_, at);
        return;
      }
      page -= __shfl_sync(~0u, upto, 31);
      read(base_ + 32);
    }
  }

  // To the next page; true when it belongs to another request. Behind the last it stays.
  __device__ bool advance() { return ++block_ == num_blocks_ && next_request(); }

  __device__ bool next_request() {
    unsigned later = __ballot_sync(~0u, lane_blocks_ > 0 && lane() > at_);
    for (int32_t base = base_ + 32; later == 0; base += 32) {
      if (base >= round_.count) return false;
      read(base);
      later = __ballot_sync(~0u, lane_blocks_ > 0);
    }
    open(__ffs(later) - 1);
    block_ = 0;
    return true;
  }

  // Behind so many pages of this request.
  __device__ void skip(int32_t pages) { block_ += pages; }

  __device__ DecodeRequest const& request() const { return request_; }
  __device__ int32_t block() const { return block_; }
  __device__ int32_t pages_left() const { return num_blocks_ - block_; }  // of the request
  __device__ uint32_t* scores() const {  // of the request's first row
    int64_t const rows = int64_t{p_.decode_length} * p_.num_index_heads;
    return round_.scores + (base_ + at_) * rows * round_.score_stride;
  }
  // Whether the block was full before this step.
  __device__ bool is_old() const { return (block_ + 1) * kBlockSize <= request_.position(0); }

 private:
  __device__ static int lane() { return threadIdx.x % 32; }

  // 32 requests, one a lane.
  __device__ void read(int32_t base) {
    base_ = base;
    lane_request_ = {};
    lane_blocks_ = 0;
    if (base + lane() < round_.count) {
      lane_request_ = request_at(p_, round_.first + base + lane());
      lane_blocks_ = scored_blocks(p_, lane_request_);
    }
  }

  __device__ void open(int at) {
    at_ = at;
    request_ = {__shfl_sync(~0u, lane_request_.request, at),
                __shfl_sync(~0u, lane_request_.first_token, at),
                __shfl_sync(~0u, lane_request_.num_tokens, at),
                __shfl_sync(~0u, lane_request_.length, at)};
    num_blocks_ = __shfl_sync(~0u, lane_blocks_, at);
  }

  BlockSelectParams const& p_;
  Round const& round_;
  int32_t base_ = 0, at_ = 0;
  DecodeRequest lane_request_{}, request_{};
  int32_t lane_blocks_ = 0, num_blocks_ = 0;
  int32_t block_ = 0;
};

}  // namespace m3::kernels::decode_select
