#include <algorithm>

#include "kernels/block_rank.cuh"
#include "kernels/packed_tokens.cuh"
#include "kernels/smxx_block_select.h"
#include "kernels/vectors.cuh"

namespace m3::kernels {
namespace {

constexpr int64_t kScoreBudget = int64_t{64} << 20;
constexpr int kThreads = 256;
constexpr int kKeyLanes = 16;  // threads side by side along the keys
constexpr int kKeysPerThread = kBlockSize / kKeyLanes;
constexpr int kRowLanes = kThreads / kKeyLanes;  // and along the query rows
constexpr int kMaxRows = 4 * kRowLanes;          // query rows (token, head) of one tile
constexpr int kBlocksPerCta = 8;
constexpr int kSlice = 32;          // channels in shared memory at once
constexpr int kPitch = kSlice + 4;  // spreads eight rows over all banks
static_assert(kMaxIndexHeads * kMaxDecodeLength <= kMaxRows, "a decode request fits one tile");

// Tokens [first, end) are scored in tiles of tile_tokens; their scores lie from `scores` on.
struct Round {
  int32_t first;
  int32_t end;
  int32_t tile_tokens;
  float* scores;  // [end - first, Hi, max_pages]
};

template <class C>
__device__ void load_keys(float (&keys)[kBlockSize][kPitch], C const* page, int slice,
                          float scale) {
  for (int i = threadIdx.x; i < kBlockSize * kSlice / 4; i += kThreads) {
    int const key = i / (kSlice / 4), channel = i % (kSlice / 4) * 4;
    float4 const x = load4(page + key * kHeadSize + slice + channel);
    *reinterpret_cast<float4*>(&keys[key][channel]) = x * scale;
  }
}

// Scores `num_rows` rows of one request, the tokens from `token` on, against kBlocksPerCta blocks.
template <class T, class C, int kRowsPerThread>
__device__ void score_rows(BlockSelectParams const& p, Round const& round, TokenPlace place,
                           int32_t token, int num_rows) {
  constexpr int ROWS = kRowsPerThread * kRowLanes;
  __shared__ float queries[ROWS][kPitch];
  __shared__ float keys[kBlockSize][kPitch];
  int const heads = p.num_index_heads;
  int const key_lane = threadIdx.x % kKeyLanes;
  int const first_row = threadIdx.x / kKeyLanes * kRowsPerThread;
  T const* const index_q = static_cast<T const*>(p.index_q) + int64_t{token} * heads * kHeadSize;
  float const scale = p.index_scale == nullptr ? 1.f : *p.index_scale;
  float const lowest = -INFINITY;

  int const last_own_block = (place.position + (num_rows - 1) / heads) / kBlockSize;
  int const first_block = blockIdx.y * kBlocksPerCta;
  int const end_block =
      min(first_block + kBlocksPerCta, min(last_own_block + 1, p.tokens.max_pages));
  for (int block = first_block; block < end_block; ++block) {
    int32_t const page = page_of(p.tokens, place.request, block);
    float acc[kRowsPerThread][kKeysPerThread] = {};
    // A missing page leaves its products at 0 here and is masked below.
    for (int slice = 0; page >= 0 && slice < kHeadSize; slice += kSlice) {
      __syncthreads();  // the previous slice has been read
      load_keys(keys, static_cast<C const*>(p.index_cache) + int64_t{page} * kBlockSize * kHeadSize,
                slice, scale);
      for (int i = threadIdx.x; i < num_rows * kSlice / 4; i += kThreads) {
        int const row = i / (kSlice / 4), channel = i % (kSlice / 4) * 4;
        *reinterpret_cast<float4*>(&queries[row][channel]) =
            load4(index_q + row * kHeadSize + slice + channel);
      }
      __syncthreads();  // the slice is complete; rows past num_rows hold rubbish nobody writes out
#pragma unroll 2
      for (int channel = 0; channel < kSlice; channel += 4) {
        float4 q[kRowsPerThread];
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) q[r] = load4(&queries[first_row + r][channel]);
#pragma unroll
        for (int k = 0; k < kKeysPerThread; ++k) {
          float4 const key = load4(&keys[key_lane + kKeyLanes * k][channel]);
#pragma unroll
          for (int r = 0; r < kRowsPerThread; ++r) acc[r][k] = dot4(q[r], key, acc[r][k]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      int const row = first_row + r;
      int const visible = page < 0 ? 0 : place.position + row / heads + 1 - block * kBlockSize;
      float best = lowest;
#pragma unroll
      for (int k = 0; k < kKeysPerThread; ++k) {
        // Unused slots may hold NaN: they are left out, not multiplied away. fmaxf drops a NaN.
        if (key_lane + kKeyLanes * k < visible) best = fmaxf(best, acc[r][k]);
      }
#pragma unroll
      for (int offset = kKeyLanes / 2; offset > 0; offset /= 2) {
        best = fmaxf(best, __shfl_xor_sync(~0u, best, offset));
      }
      if (key_lane == 0 && row < num_rows) {
        int64_t const out = int64_t{token - round.first} * heads + row;
        round.scores[out * p.tokens.max_pages + block] = best;
      }
    }
  }
}

// Grid: (tiles of tokens, groups of kBlocksPerCta blocks).
template <class T, class C, int kRowsPerThread>
__global__ void __launch_bounds__(kThreads)
    score_blocks_kernel(BlockSelectParams const p, Round const round) {
  int32_t token = round.first + blockIdx.x * round.tile_tokens;
  int32_t const end =
      min(min(token + round.tile_tokens, round.end), p.tokens.cu_query_lens[p.tokens.num_requests]);
  // A context tile may span requests: one pass for each.
  while (token < end) {
    TokenPlace const place = locate_token(p.tokens, token);
    int32_t const next = min(end, p.tokens.cu_query_lens[place.request + 1]);
    if (!place.is_padding()) {
      score_rows<T, C, kRowsPerThread>(p, round, place, token, (next - token) * p.num_index_heads);
    }
    token = next;
  }
}

__device__ uint64_t block_max(uint64_t x, uint64_t (&per_warp)[kThreads / 32]) {
  for (int offset = 16; offset > 0; offset /= 2) {
    uint64_t const other = __shfl_xor_sync(~0u, x, offset);
    if (other > x) x = other;
  }
  __syncthreads();  // everybody has read the previous result
  if (threadIdx.x % 32 == 0) per_warp[threadIdx.x / 32] = x;
  __syncthreads();
  for (uint64_t const other : per_warp) {
    if (other > x) x = other;
  }
  return x;
}

// One CTA per (token, index head): the best block below the last one taken, count times over.
__global__ void __launch_bounds__(kThreads)
    select_blocks_kernel(BlockSelectParams const p, Round const round) {
  __shared__ uint64_t per_warp[kThreads / 32];
  __shared__ int32_t chosen[kMaxTopK];
  int32_t const token = round.first + blockIdx.x / p.num_index_heads;
  int const head = blockIdx.x % p.num_index_heads;
  int32_t* const out = p.block_ids + (int64_t{head} * p.tokens.num_tokens + token) * p.top_k;
  TokenPlace const place = locate_token(p.tokens, token);
  int32_t const own = place.is_padding() ? -1 : place.own_block();
  int32_t const visible = min(own + 1, p.tokens.max_pages);
  int32_t const lane = threadIdx.x;
  if (visible <= p.top_k) {  // all of them, padding rows none
    if (lane < p.top_k) out[lane] = lane < visible ? lane : -1;
    return;
  }
  float const* const scores = round.scores + int64_t{blockIdx.x} * p.tokens.max_pages;
  uint64_t last = ~uint64_t{0};
  for (int i = 0; i < p.top_k; ++i) {
    uint64_t best = 0;
    for (int32_t block = lane; block < visible; block += kThreads) {
      bool const forced = block < p.init_blocks || block > own - p.local_blocks;
      uint64_t const key = rank_key(scores[block], block, forced);
      if (key < last && key > best) best = key;
    }
    last = block_max(best, per_warp);
    if (lane == 0) chosen[i] = block_of(last);
  }
  __syncthreads();
  if (lane < p.top_k) {  // ascending; the own block is the highest id there is
    int rank = 0;
    for (int i = 0; i < p.top_k; ++i) rank += chosen[i] < chosen[lane];
    out[rank] = chosen[lane];
  }
}

template <class T, class C>
cudaError_t launch_round(BlockSelectParams const& p, Round const& round, cudaStream_t stream) {
  dim3 const grid(ceil_div(round.end - round.first, round.tile_tokens),
                  ceil_div(p.tokens.max_pages, kBlocksPerCta));
  if (grid.y > 65535) return cudaErrorInvalidValue;
  if (grid.y == 0) {  // a page table without columns: nothing to score, every row is -1
  } else if (round.tile_tokens * p.num_index_heads <= kRowLanes) {
    score_blocks_kernel<T, C, 1><<<grid, kThreads, 0, stream>>>(p, round);
  } else {
    score_blocks_kernel<T, C, kMaxRows / kRowLanes><<<grid, kThreads, 0, stream>>>(p, round);
  }
  if (auto const error = cudaGetLastError(); error != cudaSuccess) return error;
  select_blocks_kernel<<<(round.end - round.first) * p.num_index_heads, kThreads, 0, stream>>>(
      p, round);
  return cudaGetLastError();
}

cudaError_t launch_round(BlockSelectParams const& p, Round const& round, cudaStream_t stream) {
  return launch_typed(p.type, [&](auto t) {
    using T = decltype(t);
    return p.index_scale != nullptr ? launch_round<T, __nv_fp8_e4m3>(p, round, stream)
                                    : launch_round<T, T>(p, round, stream);
  });
}

// Rounds over [first, end), each a whole number of tiles whose scores fit the workspace.
cudaError_t launch_range(BlockSelectParams const& p, int32_t first, int32_t end,
                         int32_t tile_tokens, float* scores, cudaStream_t stream) {
  int64_t const token_bytes =
      int64_t{p.num_index_heads} * std::max(p.tokens.max_pages, 1) * int64_t{sizeof(float)};
  int64_t const tiles = std::max<int64_t>(1, kScoreBudget / token_bytes / tile_tokens);
  int64_t const step = tiles * tile_tokens;
  for (int64_t at = first; at < end; at += step) {
    auto const stop = static_cast<int32_t>(std::min<int64_t>(at + step, end));
    Round const round{static_cast<int32_t>(at), stop, tile_tokens, scores};
    if (auto const error = launch_round(p, round, stream); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

int32_t first_decode_token(BlockSelectParams const& p) {
  return p.tokens.num_tokens - p.num_decode_requests * p.decode_length;
}

bool is_supported(BlockSelectParams const& p) {
  return p.num_index_heads <= kMaxIndexHeads && p.decode_length <= kMaxDecodeLength &&
         p.top_k <= kMaxTopK && first_decode_token(p) >= 0;
}

}  // namespace

int64_t block_select_workspace_bytes(int64_t num_tokens, int64_t num_index_heads,
                                     int64_t max_pages) {
  int64_t const row_bytes = max_pages * int64_t{sizeof(float)};
  return std::min(num_tokens * num_index_heads * row_bytes,
                  std::max(kScoreBudget, kMaxRows * row_bytes));
}

cudaError_t launch_block_select_context(BlockSelectParams const& p, void* workspace,
                                        cudaStream_t stream) {
  if (!is_supported(p)) return cudaErrorInvalidValue;
  return launch_range(p, 0, first_decode_token(p), kMaxRows / p.num_index_heads,
                      static_cast<float*>(workspace), stream);
}

cudaError_t launch_block_select_decode(BlockSelectParams const& p, void* workspace,
                                       cudaStream_t stream) {
  if (!is_supported(p)) return cudaErrorInvalidValue;
  // A decode tile is one request: its keys are its own, other requests would not share them.
  return launch_range(p, first_decode_token(p), p.tokens.num_tokens, std::max(p.decode_length, 1),
                      static_cast<float*>(workspace), stream);
}

cudaError_t launch_block_select(BlockSelectParams const& p, void* workspace, cudaStream_t stream) {
  auto const error = launch_block_select_context(p, workspace, stream);
  return error != cudaSuccess ? error : launch_block_select_decode(p, workspace, stream);
}

}  // namespace m3::kernels
