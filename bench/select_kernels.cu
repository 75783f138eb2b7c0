// The selection kernels behind C functions, for bench/select_library.py: no TensorRT in between.
#include "kernels/prefill_select.h"
#include "kernels/smxx_block_select.h"
#include "kernels/smxx_decode_select.h"

using namespace m3::kernels;

extern "C" {

struct SelectStep {
  int32_t const* cu_query_lens;
  int32_t const* sequence_length;
  int32_t const* block_offsets;
  int32_t num_requests, num_tokens, max_pages;
  int32_t num_decode, q_len;
  int32_t num_index_heads, top_k, init_blocks, local_blocks;
  int32_t num_pages;
};

static BlockSelectParams select_params(SelectStep const& s, void const* index_q,
                                       void const* index_cache, float const* index_scale,
                                       int32_t* block_ids) {
  BlockSelectParams p{};
  p.tokens = {s.cu_query_lens, s.sequence_length, s.block_offsets,
              s.num_requests,  s.num_tokens,      s.max_pages};
  p.index_q = index_q;
  p.index_cache = index_cache;
  p.index_scale = index_scale;
  p.block_ids = block_ids;
  p.num_index_heads = s.num_index_heads;
  p.num_decode_requests = s.num_decode;
  p.decode_length = s.q_len;
  p.top_k = s.top_k;
  p.init_blocks = s.init_blocks;
  p.local_blocks = s.local_blocks;
  p.num_pages = s.num_pages;
  p.type = Type::kBfloat16;
  return p;
}

int64_t m3_bench_decode_select_workspace(SelectStep const* s) {
  return decode_select_workspace_bytes(s->num_decode, s->q_len, s->num_index_heads, s->max_pages);
}

int m3_bench_decode_select(SelectStep const* s, void const* index_q, void const* index_cache,
                           float const* index_scale, int32_t* block_ids, void* workspace,
                           cudaStream_t stream) {
  return launch_decode_select(select_params(*s, index_q, index_cache, index_scale, block_ids),
                              workspace, stream);
}

int64_t m3_bench_block_select_workspace(SelectStep const* s) {
  return block_select_workspace_bytes(s->num_tokens, s->num_index_heads, s->max_pages);
}

int m3_bench_block_select(SelectStep const* s, void const* index_q, void const* index_cache,
                          float const* index_scale, int32_t* block_ids, void* workspace,
                          cudaStream_t stream) {
  return launch_block_select(select_params(*s, index_q, index_cache, index_scale, block_ids),
                             workspace, stream);
}

int64_t m3_bench_smxx_prefill_select_workspace(SelectStep const* s) {
  return prefill_select_workspace_bytes(s->num_tokens, s->num_index_heads, s->max_pages);
}

int m3_bench_smxx_prefill_select(SelectStep const* s, void const* index_q, void const* index_cache,
                                 float const* index_scale, int32_t* block_ids, void* workspace,
                                 cudaStream_t stream) {
  return launch_smxx_prefill_select(select_params(*s, index_q, index_cache, index_scale, block_ids),
                                    workspace, stream);
}

int64_t m3_bench_sm90_prefill_select_workspace(SelectStep const* s) {
  return m3_bench_smxx_prefill_select_workspace(s);
}

int m3_bench_sm90_prefill_select(SelectStep const* s, void const* index_q, void const* index_cache,
                                 float const* index_scale, int32_t* block_ids, void* workspace,
                                 cudaStream_t stream) {
  return launch_sm90_prefill_select(select_params(*s, index_q, index_cache, index_scale, block_ids),
                                    workspace, stream);
}
}
