#pragma once

#include "kernels/numeric.cuh"
#include "kernels/packed_tokens.cuh"
#include "kernels/smxx_paged_decode.h"

// Which pages each block of the decode kernel reads. An item is one KV head of one query token, or
// of several neighbouring ones that share their keys; its pages are those of the context or of the
// selection. A schedule walks a block over its segments, each a share of an item's pages.
namespace m3::kernels {

// One KV head and up to `group_tokens` neighbouring query tokens of a request, which share its
// keys.
struct DecodeItem {
  int32_t request;
  int32_t first_token;
  int32_t num_tokens;
  int32_t length;  // keys that the last of the tokens sees
  int32_t head;
  int32_t num_pages;
};

// Shares of `total` pages: the first `longer` blocks get one more than the others.
struct DecodeShares {
  int32_t total, active, each, longer;

  __device__ DecodeShares(int32_t total_pages, int32_t num_blocks)
      : total(total_pages), active(max(1, min(num_blocks, total_pages))) {
    each = total / active;
    longer = total - each * active;
  }
  __device__ int32_t begin(int32_t block) const {
    return block >= active ? total : block * each + min(block, longer);
  }
  __device__ int32_t block_of(int32_t page) const {
    int32_t const border = longer * (each + 1);
    return page < border ? page / (each + 1) : longer + (page - border) / each;
  }
};

// All items' pages laid end to end, of which each block takes an equal share. An item may so be cut
// into pieces by several blocks, and a block leaves at most two pieces unfinished: one that began
// before its share and one that ends behind it. All lanes of a warp hold the same cursor and call
// it together.
class DecodeCursor {
 public:
  __device__ DecodeCursor(PagedDecodeParams const& p, int group_tokens)
      : p_(p), group_tokens_(group_tokens) {}

  // Pages of the step.
  __device__ int32_t count_pages() {
    read_ranges(0);
    int32_t sum = pages_of(lane_range_);
    for (int32_t d = 32 + lane(); d < p_.num_decode; d += 32) sum += pages_of(range_of(d));
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    return sum;
  }

  // To the first segment of `count` > 0 pages from the step's page `page` on.
  __device__ void seek(int32_t page, int32_t count) {
    left_ = count;
    for (int32_t base = 0, before = 0; base < p_.num_decode; base += 32) {
      if (base > 0) read_ranges(base);
      int32_t const pages = pages_of(lane_range_);
      int32_t upto = pages;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        int32_t const left = __shfl_up_sync(~0u, upto, offset);
        if (lane() >= offset) upto += left;
      }
      unsigned const behind = __ballot_sync(~0u, before + upto > page);
      if (behind != 0) {
        int const at = __ffs(behind) - 1;
        open_request(base + at);
        first_ = page - before - __shfl_sync(~0u, upto - pages, at);
        break;
      }
      before += __shfl_sync(~0u, upto, 31);
    }
    open_item(0, 0);
    while (first_ >= item_.num_pages) {
      first_ -= item_.num_pages;
      next_item();
    }
  }

  // The segment: pages [first, end) of the item.
  __device__ DecodeItem const& item() const { return item_; }
  __device__ int32_t first() const { return first_; }
  __device__ int32_t end() const { return min(item_.num_pages, first_ + left_); }
  __device__ bool done() const { return left_ == 0; }
  __device__ void next() {
    left_ -= end() - first_;
    first_ = 0;
    if (left_ > 0) next_item();
  }

  __device__ int32_t first_token() const { return item_.first_token; }
  __device__ int32_t num_tokens() const { return item_.num_tokens; }
  __device__ int32_t head() const { return item_.head; }
  // Of the item, to which a row belongs, and the row's place in q and out; -1 behind the last.
  __device__ static int32_t token_of(int row, int group) { return row / group; }
  __device__ int64_t query(int row, int group) const {
    if (row >= item_.num_tokens * group) return -1;
    return int64_t{item_.first_token + row / group} * p_.num_heads + item_.head * group +
           row % group;
  }
  // A schedule's reads of memory, ahead of request() and length().
  __device__ void read() {}
  __device__ void resolve() {}
  __device__ int32_t request() const { return item_.request; }
  __device__ int32_t length() const { return item_.length; }

 private:
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

  // A group of tokens without visible keys still has a page: someone must write its zeros.
  __device__ int32_t pages_of(int32_t length) const {
    int32_t const blocks = (length + kBlockSize - 1) / kBlockSize;
    return max(1, p_.block_ids == nullptr ? blocks : min(blocks, p_.top_k));
  }

  __device__ int32_t group_end(Range const& range, int32_t group) const {
    return min(range.count, (group + 1) * group_tokens_);
  }

  __device__ int32_t length_of(Range const& range, int32_t group) const {
    return max(0, range.length - range.count + group_end(range, group));
  }

  __device__ int32_t pages_of(Range const& range) const {
    int32_t sum = 0;
    for (int32_t group = 0; group * group_tokens_ < range.count; ++group) {
      sum += pages_of(length_of(range, group));
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
    item_.num_pages = pages_of(item_.length);
  }

  PagedDecodeParams const& p_;
  int32_t group_tokens_;
  int32_t lane_base_;
  Range lane_range_;
  int32_t decode_ = 0, group_ = 0;
  int32_t first_ = 0, left_ = 0;
  Range range_{};
  DecodeItem item_{};
};

// Request and keys of a decode token that is not where ItemRounds looks first; no keys for padding.
__device__ __noinline__ inline int2 find_token(PackedTokens tokens, int32_t token) {
  TokenPlace const place = locate_token(tokens, token);
  return make_int2(max(0, place.request), place.position + 1);
}

// Whole items, one query token and KV head each, in rounds: block or cluster `first` of `step`
// takes every step-th one. Where the item belongs is read ahead: read() starts it, resolve() takes
// it.
template <bool kContext>
class RowRounds {
 public:
  __device__ RowRounds(PagedDecodeParams const& p, int32_t first, int32_t step)
      : p_(p),
        token_(first / p.num_kv_heads),
        head_(first % p.num_kv_heads),
        step_tokens_(step / p.num_kv_heads),
        step_heads_(step % p.num_kv_heads) {}

  __device__ bool done() const {
    return token_ >= (kContext ? p_.num_context : p_.num_decode * p_.q_len);
  }
  __device__ void next() {
    token_ += step_tokens_;
    head_ += step_heads_;
    if (head_ >= p_.num_kv_heads) {
      head_ -= p_.num_kv_heads;
      ++token_;
    }
  }
  __device__ int32_t first() const { return 0; }
  __device__ int32_t end() const { return p_.top_k; }

  __device__ int32_t first_token() const {
    return kContext ? token_ : p_.tokens.num_tokens - p_.num_decode * p_.q_len + token_;
  }
  __device__ static constexpr int32_t num_tokens() { return 1; }
  __device__ int32_t head() const { return head_; }
  __device__ static constexpr int32_t token_of(int, int) { return 0; }
  __device__ int64_t query(int row, int group) const {
    if (row >= group) return -1;
    return int64_t{first_token()} * p_.num_heads + head_ * group + row;
  }

  // Where the token is when every decode request before it has its q_len tokens; of context rows,
  // in the request of the one before.
  __device__ void read() {
    if constexpr (!kContext) {
      request_ = max(0, p_.tokens.num_requests - p_.num_decode + token_ / p_.q_len);
    }
    begin_ = p_.tokens.cu_query_lens[request_];
    end_ = p_.tokens.cu_query_lens[request_ + 1];
    length_ = p_.tokens.sequence_length[request_];
  }
  __device__ void resolve() {
    int32_t const token = first_token();
    if (token >= begin_ && token < end_) {
      length_ = max(0, length_ - (end_ - 1 - token));
    } else {
      int2 const place = find_token(p_.tokens, token);
      request_ = place.x;
      length_ = place.y;
    }
  }
  __device__ int32_t request() const { return request_; }
  __device__ int32_t length() const { return length_; }

 private:
  PagedDecodeParams const& p_;
  int32_t token_, head_, step_tokens_, step_heads_;
  int32_t request_ = 0, begin_ = 0, end_ = 0, length_ = 0;
};

using ItemRounds = RowRounds<false>;

}  // namespace m3::kernels
