#pragma once

#include "kernels/paged_prefill_tiles.cuh"
#include "kernels/smxx_invert_blocks.h"

// What the kernels of the inversion share.
namespace m3::kernels {

// Quotients of numbers that are below 2^20 / divisor.
class Divider {
 public:
  __device__ explicit Divider(int divisor) : reciprocal_((1 << 20) / divisor + 1) {}
  __device__ int operator()(uint32_t number) const {
    return static_cast<int>(number * reciprocal_ >> 20);
  }

 private:
  uint64_t reciprocal_;
};

// The first of a request's tokens in the round, counted from the round's first.
__device__ inline int32_t first_of(InvertParams const& p, int32_t request) {
  int32_t const token = p.tokens.cu_query_lens[request] - p.first_token;
  return min(max(token, 0), p.num_tokens);
}
__device__ inline int32_t num_blocks(InvertParams const& p, int32_t request) {
  if (first_of(p, request) >= first_of(p, request + 1)) return 0;
  int32_t const length = max(0, p.tokens.sequence_length[request]);
  return min(p.tokens.max_pages, (length + kBlockSize - 1) / kBlockSize);
}
// `token`: of the round.
__device__ inline bool is_joined(InvertParams const& p, int head, int32_t request, int32_t token) {
  return is_joined(p.joined, p.tokens, p.num_kv_heads, head, request, p.first_token + token);
}
// Position of a token of the request, minus the token's index.
__device__ inline int32_t position_shift(InvertParams const& p, int32_t request) {
  return p.tokens.sequence_length[request] - p.tokens.cu_query_lens[request + 1];
}

// Lists of a block: its own, and with two lists the one of it and the next block.
__device__ inline int32_t first_list(InvertParams const& p, int32_t block) {
  return block << (p.lists - 1);
}
__device__ inline int32_t block_of(InvertParams const& p, int32_t list) {
  return list >> (p.lists - 1);
}
__device__ inline bool is_pair_list(InvertParams const& p, int32_t list) {
  return (list & (p.lists - 1)) != 0;
}

__device__ inline int32_t work_of(InvertParams const& p, int32_t list, int32_t queries) {
  int32_t const tiles = (queries + p.tile_queries - 1) / p.tile_queries;
  return queries == 0 ? 0 : max(p.least_work, tiles << is_pair_list(p, list));
}

__device__ inline uint4 operator&(uint4 a, uint4 b) {
  return make_uint4(a.x & b.x, a.y & b.y, a.z & b.z, a.w & b.w);
}
__device__ inline uint4 operator|(uint4 a, uint4 b) {
  return make_uint4(a.x | b.x, a.y | b.y, a.z | b.z, a.w | b.w);
}
__device__ inline uint4 operator^(uint4 a, uint4 b) {
  return make_uint4(a.x ^ b.x, a.y ^ b.y, a.z ^ b.z, a.w ^ b.w);
}
__device__ inline uint4 operator~(uint4 a) {
  return make_uint4(~a.x, ~a.y, ~a.z, ~a.w);
}
__device__ inline bool is_zero(uint32_t x) {
  return x == 0;
}
__device__ inline bool is_zero(uint4 x) {
  return (x.x | x.y | x.z | x.w) == 0;
}

constexpr int kRunBlocks = 32;  // runs end with the 32nd block of a sequence, the 64th and so on

// Of the blocks that a token chose, neighbours become pairs from the first of them on: which are
// pairs is up to the token's own choice. Masks of tokens: `words` of each list, `pitch` from list
// to list. At first all tokens are in the blocks' own lists. `blocks` begin a run.
template <int kThreads, class Word>
__device__ void form_pairs(Word* masks, int pitch, int words, int blocks) {
  // f(place in the run, word of a block's own list, that of the block so many behind it).
  Divider const block_of_word(words);
  auto const each_word = [&](auto const& f) {
    for (int i = threadIdx.x; i < blocks * words; i += kThreads) {
      int const block = block_of_word(i), place = block % kRunBlocks;
      Word* const own = masks + 2 * pitch * block + (i - block * words);
      f(place, own, [&](int behind) {
        bool const in_run = place + behind >= 0 && place + behind < kRunBlocks;
        return in_run && block + behind < blocks ? own[2 * pitch * behind] : Word{};
      });
    }
    __syncthreads();
  };
  each_word([&](int, Word* own, auto const& at) {
    Word pair = *own & at(1);
    Word run = pair;  // tokens that chose all blocks from here to this one
    for (int i = -1; !is_zero(run); --i) {
      run = run & at(i);
      pair = pair ^ run;  // the second of a pair begins none
    }
    own[pitch] = pair;
  });
  each_word([&](int place, Word* own, auto const&) {
    Word const pairs = place > 0 ? own[pitch] | own[-pitch] : own[pitch];
    if (!is_zero(pairs)) *own = *own & ~pairs;
  });
}

// The warp's 32 neighbouring pairs from `first` on: those in `missing` have no block, those of them
// in `joined` begin a row of a joined tile.
__device__ inline void clear_lse(InvertParams const& p, int64_t first, uint32_t missing,
                                 uint32_t joined) {
  int const lane = threadIdx.x % 32, quads = p.group / 4;  // a power of two
  int const shift = __ffs(quads) - 1;
  auto* const lse = reinterpret_cast<float4*>(p.lse + first * p.group);
  for (int i = lane; missing != 0 && i < 32 * quads; i += 32) {
    int const pair = i >> shift;
    float const x = (joined >> pair & 1) != 0 ? INFINITY : -INFINITY;
    if ((missing >> pair & 1) != 0) lse[i] = make_float4(x, x, x, x);
  }
}

// Exclusive sum over a thread block of kWarps; `sums` holds a value a warp. `total`: of all.
template <int kWarps, class T>
__device__ T block_scan(T x, T* sums, T& total) {
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  T inclusive = x;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    T const other = __shfl_up_sync(~0u, inclusive, offset);
    if (lane >= offset) inclusive += other;
  }
  __syncthreads();  // the sums of an earlier scan have been read
  if (lane == 31) sums[warp] = inclusive;
  __syncthreads();
  T before = 0;
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += sums[w];
    total += sums[w];
  }
  return before + inclusive - x;
}

}  // namespace m3::kernels
