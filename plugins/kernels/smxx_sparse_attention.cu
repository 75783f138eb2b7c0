#include "kernels/paged_attention_core.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/smxx_sparse_attention.h"

namespace m3::kernels {
namespace {

constexpr int CHECKED_TOKENS = 16;  // of a thread block that looks for rows left to do

// A token's row of a KV head, by a thread block.
template <class T, class C>
__device__ void attend(SparseAttentionParams const& p, AttentionTile& tile, int32_t token, int head,
                       TokenPlace const& place) {
  int const group = p.num_heads / p.num_kv_heads;
  // Virtual single-head pages: each KV head selects for itself, so a row has its own page table.
  int64_t const token_stride = int64_t{p.num_kv_heads} * kHeadSize;
  int64_t const ids_per_page = int64_t{2} * kBlockSize * p.num_kv_heads;
  C const* const pool = static_cast<C const*>(p.kv_cache);
  PagedView<C> const view{pool,      pool + kBlockSize * token_stride, kHeadSize, 0, token_stride,
                          p.kv_scale};
  int32_t const* const blocks =
      p.block_ids + (int64_t{head} * p.tokens.num_tokens + token) * p.top_k;
  int64_t const row = (int64_t{token} * p.num_heads + head * group) * kHeadSize;
  int const num_pages = place.is_padding() ? 0 : p.top_k;
  attend_row(tile, static_cast<T const*>(p.q) + row, static_cast<T*>(p.out) + row, group,
             p.softmax_scale, view, head, num_pages, [&](int i) {
               PageRef page = causal_page(p.tokens, place, blocks[i]);
               page.id = page.id * ids_per_page + head;
               return page;
             });
}

// Grid: (tokens, KV heads).
template <class T, class C>
__global__ void __launch_bounds__(kAttentionThreads)
    sparse_attention_kernel(SparseAttentionParams const p) {
  __shared__ AttentionTile tile;
  int32_t const token = blockIdx.x;
  attend<T, C>(p, tile, token, blockIdx.y, locate_token(p.tokens, token));
}

// Grid: (groups of tokens, KV heads). A warp looks at every fourth token's blocks, one a lane.
__global__ void __launch_bounds__(kAttentionThreads)
    partial_rows_kernel(SparseAttentionParams const p) {
  __shared__ AttentionTile tile;
  __shared__ bool is_left[CHECKED_TOKENS];
  wait_for_previous_kernel();
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int32_t const first = blockIdx.x * CHECKED_TOKENS;
  int const count = min(CHECKED_TOKENS, p.num_rows - first);
  int64_t const first_row = int64_t{static_cast<int>(blockIdx.y)} * p.tokens.num_tokens + first;
#pragma unroll
  for (int i = warp; i < CHECKED_TOKENS; i += kAttentionWarps) {
    bool const exists = i < count && lane < p.top_k;
    int32_t const id = exists ? p.block_ids[(first_row + i) * p.top_k + lane] : -1;
    TokenPlace const place = locate_token(p.tokens, first + i);
    uint32_t const chosen = __reduce_or_sync(~0u, id >= 0 && id < 32 ? 1u << id : 0);
    if (lane == 0) {
      is_left[i] = !place.is_padding() && !sees_all_blocks(place.position, p.top_k, chosen);
    }
  }
  __syncthreads();
  for (int i = 0; i < count; ++i) {
    if (!is_left[i]) continue;
    __syncthreads();  // the row before is done with the tile
    attend<__nv_bfloat16, __nv_bfloat16>(p, tile, first + i, blockIdx.y,
                                         locate_token(p.tokens, first + i));
  }
}

template <class T>
cudaError_t launch(SparseAttentionParams const& p, cudaStream_t stream) {
  dim3 const grid(p.num_rows, p.num_kv_heads);
  if (p.kv_scale == nullptr) {
    sparse_attention_kernel<T, T><<<grid, kAttentionThreads, 0, stream>>>(p);
  } else {
    sparse_attention_kernel<T, __nv_fp8_e4m3><<<grid, kAttentionThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_sparse_attention(SparseAttentionParams const& p, cudaStream_t stream) {
  if (p.num_rows == 0) return cudaSuccess;
  if (p.num_heads % p.num_kv_heads != 0 || p.num_heads > kMaxGroup * p.num_kv_heads) {
    return cudaErrorInvalidValue;
  }
  return launch_typed(p.type, [&](auto t) { return launch<decltype(t)>(p, stream); });
}

cudaError_t launch_partial_rows(SparseAttentionParams const& p, cudaStream_t stream) {
  if (p.num_rows == 0) return cudaSuccess;
  if (p.num_heads % p.num_kv_heads != 0 || p.num_heads > kMaxGroup * p.num_kv_heads ||
      p.top_k > 32 || p.type != Type::kBfloat16 || p.kv_scale != nullptr) {
    return cudaErrorInvalidValue;
  }
  dim3 const grid((p.num_rows + CHECKED_TOKENS - 1) / CHECKED_TOKENS, p.num_kv_heads);
  return launch_behind(partial_rows_kernel, grid, kAttentionThreads, 0, stream, p);
}

}  // namespace m3::kernels
