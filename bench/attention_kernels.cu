// The paged kernels behind C functions, for bench/kernel_library.py: no TensorRT in between.
#include "kernels/paged_prefill.h"
#include "kernels/smxx_cache_update.h"
#include "kernels/smxx_paged_attention.h"
#include "kernels/smxx_paged_decode.h"
#include "kernels/smxx_selected_decode.h"
#include "kernels/sparse_prefill.h"

using namespace m3::kernels;

// With a name of its own: in an anonymous namespace it would keep the functions below to this file.
struct Step {
  int32_t const* cu_query_lens;
  int32_t const* sequence_length;
  int32_t const* block_offsets;
  int32_t num_requests, num_tokens, max_pages;
  int32_t num_decode, q_len;
  int32_t num_heads, num_kv_heads;
  float softmax_scale;
};

namespace {

PackedTokens packed(Step const& s) {
  return {s.cu_query_lens, s.sequence_length, s.block_offsets,
          s.num_requests,  s.num_tokens,      s.max_pages};
}

ContextRows context_rows(Step const& s, void const* q, void const* kv_cache, int32_t num_pages,
                         void* out) {
  ContextRows p{};
  p.tokens = packed(s);
  p.q = q;
  p.kv_cache = kv_cache;
  p.out = out;
  p.num_heads = s.num_heads;
  p.num_kv_heads = s.num_kv_heads;
  p.num_pages = num_pages;
  p.num_requests = s.num_requests - s.num_decode;
  p.num_tokens = s.num_tokens - s.num_decode * s.q_len;
  p.softmax_scale = s.softmax_scale;
  return p;
}

// Without rows yet. The cache is e4m3 when there is a scale, else bf16.
PagedDecodeParams decode_params(Step const& s, void const* q, void const* kv_cache,
                                int32_t const* block_ids, int32_t top_k, void* out,
                                float const* kv_scale) {
  PagedDecodeParams p{};
  p.tokens = packed(s);
  Type const type = kv_scale == nullptr ? Type::kBfloat16 : Type::kFloat8E4m3;
  p.view = block_ids == nullptr ? view_of_pages(kv_cache, s.num_kv_heads, type)
                                : view_of_virtual_pages(kv_cache, s.num_kv_heads, type);
  p.kv_scale = kv_scale;
  p.q = q;
  p.block_ids = block_ids;
  p.out = out;
  p.num_heads = s.num_heads;
  p.num_kv_heads = s.num_kv_heads;
  p.top_k = top_k;
  p.softmax_scale = s.softmax_scale;
  return p;
}

}  // namespace

extern "C" {

int64_t m3_bench_decode_workspace(Step const* s, int selected) {
  return static_cast<int64_t>(
      paged_decode_workspace(s->num_heads, s->num_kv_heads, s->q_len, selected != 0));
}

int m3_bench_decode(Step const* s, void const* q, void const* kv_cache, int32_t const* block_ids,
                    int32_t top_k, void* out, void* workspace, cudaStream_t stream,
                    float const* kv_scale) {
  auto p = decode_params(*s, q, kv_cache, block_ids, top_k, out, kv_scale);
  p.num_decode = s->num_decode;
  p.q_len = s->q_len;
  return launch_paged_decode(p, workspace, stream);
}

int m3_bench_prefill(Step const* s, void const* q, void const* kv_cache, int32_t num_pages,
                     void* out, int wgmma, cudaStream_t stream) {
  PagedPrefillParams const p{context_rows(*s, q, kv_cache, num_pages, out)};
  return wgmma ? launch_sm90_paged_prefill(p, stream) : launch_smxx_paged_prefill(p, stream);
}

int64_t m3_bench_sparse_prefill_workspace(Step const* s, int32_t top_k) {
  return static_cast<int64_t>(sparse_prefill_workspace(s->num_tokens, s->num_heads, s->num_kv_heads,
                                                       s->num_requests - s->num_decode,
                                                       s->max_pages, top_k));
}

// Rounds of 0 tokens: the kernels' own choice.
int m3_bench_sparse_prefill(Step const* s, void const* q, void const* kv_cache,
                            float const* kv_scale, int32_t const* block_ids, int32_t num_pages,
                            int32_t top_k, int32_t round_tokens, int32_t round_heads, int wgmma,
                            void* out, void* workspace, cudaStream_t stream) {
  SparsePrefillParams p{context_rows(*s, q, kv_cache, num_pages, out), kv_scale};
  p.block_ids = block_ids;
  p.top_k = top_k;
  SparsePrefillRounds rounds{round_tokens, round_heads};
  if (round_tokens == 0) {
    rounds = sparse_prefill_rounds(p.num_tokens, p.num_heads, p.num_kv_heads, top_k);
  }
  return wgmma ? launch_sm90_sparse_prefill(p, rounds, workspace, stream)
               : launch_smxx_sparse_prefill(p, rounds, workspace, stream);
}

// The context rows query by query.
int m3_bench_selected_rows(Step const* s, void const* q, void const* kv_cache,
                           float const* kv_scale, int32_t const* block_ids, int32_t top_k,
                           void* out, cudaStream_t stream) {
  auto p = decode_params(*s, q, kv_cache, block_ids, top_k, out, kv_scale);
  p.num_context = s->num_tokens - s->num_decode * s->q_len;
  return launch_selected_decode(p, stream);
}

// How the plugin computes the context rows: SparseRoute.
int m3_bench_sparse_route(Step const* s, int32_t top_k) {
  return static_cast<int>(sparse_route(s->num_tokens - s->num_decode * s->q_len, s->num_heads,
                                       s->num_requests - s->num_decode, s->max_pages, top_k));
}

// The selected blocks of the context rows by a dense kernel.
int m3_bench_masked_prefill(Step const* s, void const* q, void const* kv_cache,
                            int32_t const* block_ids, int32_t num_pages, int32_t top_k, void* out,
                            int wgmma, cudaStream_t stream) {
  PagedPrefillParams p{context_rows(*s, q, kv_cache, num_pages, out)};
  p.block_ids = block_ids;
  p.top_k = top_k;
  p.joined.end_position = kAllPositions;
  return wgmma ? launch_sm90_paged_prefill(p, stream) : launch_smxx_paged_prefill(p, stream);
}

int m3_bench_cache_update(Step const* s, int32_t num_index_heads, int32_t rotary_dim,
                          void const* qkv, int32_t const* position_ids, void* kv_cache,
                          void* index_cache, float const* inv_freq, float const* norms, void* q,
                          void* index_q, cudaStream_t stream) {
  CacheUpdateParams p{};
  p.tokens = packed(*s);
  p.qkv = qkv;
  p.position_ids = position_ids;
  p.kv_cache = kv_cache;
  p.inv_freq = inv_freq;
  p.q_norm = norms;
  p.k_norm = norms + kHeadSize;
  p.index_cache = index_cache;
  p.index_q_norm = norms + 2 * kHeadSize;
  p.index_k_norm = norms + 3 * kHeadSize;
  p.q = q;
  p.index_q = index_q;
  p.num_heads = s->num_heads;
  p.num_kv_heads = s->num_kv_heads;
  p.num_index_heads = num_index_heads;
  p.rotary_dim = rotary_dim;
  p.epsilon = 1e-6f;
  p.type = Type::kBfloat16;
  return launch_cache_update(p, stream);
}
}
