// The inversion of a prefill chunk's selections alone, for bench/msa_library.py.
#include "kernels/smxx_invert_blocks.h"
#include "kernels/sparse_prefill_plan.h"

using namespace m3::kernels;

extern "C" {

struct InvertStep {  // context requests only
  int32_t const* cu_query_lens;
  int32_t const* sequence_length;
  int32_t const* block_offsets;
  int32_t num_requests, num_tokens, max_pages;
  int32_t num_heads, num_kv_heads, top_k;
};

static int64_t lse_bytes(InvertStep const& s) {
  int64_t const bytes = int64_t{s.num_tokens} * s.num_heads * s.top_k * sizeof(float);
  return (bytes + 255) / 256 * 256;
}

static InvertedBlocks place(InvertStep const& s, char*& memory) {
  return place_inverted_blocks(memory, s.num_tokens, s.num_kv_heads, s.num_requests, s.max_pages,
                               s.top_k);
}

// All tokens in one round.
int64_t m3_bench_invert_workspace(InvertStep const* s) {
  char* memory = nullptr;
  place(*s, memory);
  return reinterpret_cast<intptr_t>(memory) + lse_bytes(*s);
}

int m3_bench_invert(InvertStep const* s, int32_t const* block_ids, void* workspace,
                    cudaStream_t stream) {
  InvertParams p{};
  p.tokens = {s->cu_query_lens, s->sequence_length, s->block_offsets,
              s->num_requests,  s->num_tokens,      s->max_pages};
  p.block_ids = block_ids;
  p.num_kv_heads = s->num_kv_heads;
  p.num_requests = s->num_requests;
  p.num_tokens = s->num_tokens;
  p.top_k = s->top_k;
  p.group = s->num_heads / s->num_kv_heads;
  p.tile_queries = kSparseTileRows / p.group;
  p.window = kPrefillRows / p.group;
  p.lse = static_cast<float*>(workspace);
  char* memory = static_cast<char*>(workspace) + lse_bytes(*s);
  return launch_invert_blocks(p, place(*s, memory), stream);
}
}
