#include "kernels/paged_attention_core.cuh"
#include "kernels/smxx_sparse_attention.h"

namespace m3::kernels {
namespace {

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

}  // namespace m3::kernels
