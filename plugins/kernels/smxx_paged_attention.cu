#include "kernels/paged_attention_core.cuh"
#include "kernels/smxx_paged_attention.h"

namespace m3::kernels {
namespace {

// Grid: (tokens, KV heads).
template <class T, class C>
__global__ void __launch_bounds__(kAttentionThreads)
    paged_attention_kernel(PagedAttentionParams const p) {
  __shared__ AttentionTile tile;
  int32_t const token = blockIdx.x;
  int const head = blockIdx.y;
  int const group = p.num_heads / p.num_kv_heads;
  TokenPlace const place = locate_token(p.tokens, token);

  int64_t const half_page = int64_t{kBlockSize} * p.num_kv_heads * kHeadSize;
  C const* const pool = static_cast<C const*>(p.kv_cache);
  PagedView<C> const view{
      pool,      pool + half_page, 2 * half_page, kHeadSize, int64_t{p.num_kv_heads} * kHeadSize,
      p.kv_scale};
  int64_t const row = (int64_t{token} * p.num_heads + head * group) * kHeadSize;
  int const num_pages = place.is_padding() ? 0 : place.own_block() + 1;
  attend_row(tile, static_cast<T const*>(p.q) + row, static_cast<T*>(p.out) + row, group,
             p.softmax_scale, view, head, num_pages,
             [&](int i) { return causal_page(p.tokens, place, i); });
}

template <class T>
cudaError_t launch(PagedAttentionParams const& p, cudaStream_t stream) {
  dim3 const grid(p.num_rows, p.num_kv_heads);
  if (p.kv_scale == nullptr) {
    paged_attention_kernel<T, T><<<grid, kAttentionThreads, 0, stream>>>(p);
  } else {
    paged_attention_kernel<T, __nv_fp8_e4m3><<<grid, kAttentionThreads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_paged_attention(PagedAttentionParams const& p, cudaStream_t stream) {
  if (p.num_rows == 0) return cudaSuccess;
  if (p.num_heads % p.num_kv_heads != 0 || p.num_heads > kMaxGroup * p.num_kv_heads) {
    return cudaErrorInvalidValue;
  }
  return launch_typed(p.type, [&](auto t) { return launch<decltype(t)>(p, stream); });
}

}  // namespace m3::kernels
