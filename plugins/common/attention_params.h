#pragma once

#include "common/paged_inputs.h"
#include "kernels/paged_prefill.h"
#include "kernels/smxx_paged_decode.h"

// The two attention ops describe their tensors alike: what their kernels for decode rows and for
// context rows take of that. What selections need in addition is left empty.
namespace m3 {

template <class Attention>
kernels::PagedDecodeParams decode_params(Attention const& p, RowSplit const& rows,
                                         kernels::DecodeView const& view) {
  kernels::PagedDecodeParams decode{};
  decode.tokens = p.tokens;
  decode.view = view;
  decode.kv_scale = p.kv_scale;
  decode.q = p.q;
  decode.out = p.out;
  decode.num_heads = p.num_heads;
  decode.num_kv_heads = p.num_kv_heads;
  decode.num_decode = rows.num_decode;
  decode.q_len = rows.q_len;
  decode.softmax_scale = p.softmax_scale;
  return decode;
}

template <class Attention>
kernels::ContextRows context_rows(Attention const& p, RowSplit const& rows, int64_t num_pages) {
  kernels::ContextRows context{};
  context.tokens = p.tokens;
  context.q = p.q;
  context.kv_cache = p.kv_cache;
  context.out = p.out;
  context.num_heads = p.num_heads;
  context.num_kv_heads = p.num_kv_heads;
  context.num_pages = static_cast<int32_t>(num_pages);
  context.num_requests = rows.context_requests;
  context.num_tokens = rows.context_tokens;
  context.softmax_scale = p.softmax_scale;
  return context;
}

// With the fastest kernel of this GPU.
inline cudaError_t launch_paged_prefill(kernels::PagedPrefillParams const& p, cudaStream_t stream) {
#ifdef M3_SM90
  // TMA describes no empty cache.
  if (p.num_pages > 0 && kernels::has_sm90_paged_prefill(p.num_heads, p.num_kv_heads)) {
    return kernels::launch_sm90_paged_prefill(p, stream);
  }
#endif
  return kernels::launch_smxx_paged_prefill(p, stream);
}

}  // namespace m3
