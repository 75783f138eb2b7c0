#pragma once

#include "kernels/global_memory.cuh"
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

// A row of the round's results: a token of a request and an index head.
struct SelectedRow {
  DecodeRequest request;
  int32_t token, head;

  __device__ static SelectedRow at(BlockSelectParams const& p, Round const& round, int32_t row) {
    int32_t const heads = p.num_index_heads;
    return {request_at(p, round.first + row / heads / p.decode_length),
            row / heads % p.decode_length, row % heads};
  }
  __device__ bool exists() const { return token < request.num_tokens; }
  __device__ int32_t* ids(BlockSelectParams const& p) const {
    return p.block_ids +
           (int64_t{head} * p.tokens.num_tokens + request.first_token + token) * p.top_k;
  }
};

// Which pages a block takes follows from lengths that have to be read first. Until then the
// requests' rows of the page table come to L2, as far as a line a thread goes.
__device__ inline void prefetch_tables(BlockSelectParams const& p, Round const& round) {
  int64_t const first = p.tokens.num_requests - p.num_decode_requests + round.first;
  int64_t const at = int64_t{blockIdx.x * blockDim.x + threadIdx.x} * 32;
  if (at < int64_t{round.count} * p.tokens.max_pages) {
    prefetch(p.tokens.block_offsets + first * p.tokens.max_pages + at);
  }
}

// What a block of threads keeps of a page.
struct Page {
  int32_t id;     // -1: missing
  uint32_t word;  // first token and number of tokens of its request, whether it was full before
  uint32_t row;   // where the score of the first row stands

  __device__ bool is_old() const { return (word & 1) != 0; }
  __device__ uint32_t request() const { return word >> 1; }
};
__device__ inline int32_t first_token_of(uint32_t request) {
  return static_cast<int32_t>(request >> 4);
}
__device__ inline int32_t num_tokens_of(uint32_t request) {
  return static_cast<int32_t>(request & 15);
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

  // To the first page of the next request, if there is one.
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

  __device__ DecodeRequest const& request() const { return request_; }
  __device__ int32_t block() const { return block_; }
  __device__ int32_t pages_left() const { return num_blocks_ - block_; }  // of the request
  // The page so many behind this one, of the same request.
  __device__ Page page(int32_t behind) const {
    int32_t const block = block_ + behind;
    bool const old = (block + 1) * kBlockSize <= request_.position(0);
    auto const rows = static_cast<uint32_t>((base_ + at_) * p_.decode_length * p_.num_index_heads);
    return {page_of(p_.tokens, request_.request, block),
            static_cast<uint32_t>(request_.first_token << 5 | request_.num_tokens << 1) | old,
            rows * static_cast<uint32_t>(round_.score_stride) + block};
  }

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

// The pages of a block of threads, numbered from its first one: those of a batch that is scored, of
// the next one, which is loaded ahead, and of one that is read into the table meanwhile.
template <int kBatch>
struct PageTable {
  static constexpr int SIZE = 3 * kBatch;

  Page pages[SIZE];
  int32_t drawn;  // slices of the pool

  __device__ static int32_t place(int32_t page) {
    return static_cast<int32_t>(static_cast<uint32_t>(page) % SIZE);
  }
  __device__ Page const& operator[](int32_t page) const { return pages[place(page)]; }

  // The pages [first, last); page 0 is page `begin` of the line. All warps, then a barrier.
  __device__ void fill(PageCursor& cursor, int32_t begin, int32_t first, int32_t last) {
    int const lane = threadIdx.x % 32;
#pragma unroll 1
    for (int32_t base = first + threadIdx.x / 32 * 32; base < last; base += blockDim.x) {
      cursor.seek(begin + base);
      Page mine{};
#pragma unroll 1
      for (int32_t at = 0; at < 32;) {
        int32_t const count = cursor.pages_left();
        if (lane >= at && lane - at < count) mine = cursor.page(lane - at);
        at += count;
        if (at < 32 && !cursor.next_request()) break;
      }
      if (base + lane < last) pages[place(base + lane)] = mine;
    }
  }

  // Later ones, which nobody waits for: out of line, its code would be in the way.
  __device__ __noinline__ void fill_later(BlockSelectParams const& p, Round const& round,
                                          int32_t begin, int32_t first, int32_t last) {
    PageCursor cursor(p, round);
    cursor.count_pages();
    fill(cursor, begin, first, last);
  }
};

}  // namespace m3::kernels::decode_select
