// Joining tiles and inverting the selections of the others, for bench/msa_library.py.
#include "kernels/smxx_invert_blocks.h"
#include "kernels/smxx_join_tiles.h"
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

static InvertedBlocks place(InvertStep const& s, Carver& carver, float*& lse, JoinedTiles& joined) {
  joined = place_joined_tiles(carver, s.num_heads, s.num_kv_heads, s.num_tokens, s.num_requests);
  carver.take(lse, int64_t{s.num_tokens} * s.num_heads * s.top_k);
  return place_inverted_blocks(carver, s.num_tokens, s.num_kv_heads, s.num_requests, s.max_pages,
                               s.top_k, kMostLists);
}

// All tokens in one round.
int64_t m3_bench_invert_workspace(InvertStep const* s) {
  Carver carver(nullptr);
  float* lse = nullptr;
  JoinedTiles joined{};
  place(*s, carver, lse, joined);
  return static_cast<int64_t>(carver.used());
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
  p.lists = kMostLists;
  p.least_work = 1;
  Carver carver(workspace);
  InvertedBlocks const blocks = place(*s, carver, p.lse, p.joined);
  limit_joined_tiles(p.joined, p.num_tokens, s->num_heads, p.top_k);
  p.behind_join = p.joined.flags != nullptr;
  PagedPrefillParams tiles{};
  tiles.tokens = p.tokens;
  tiles.num_heads = s->num_heads;
  tiles.num_kv_heads = p.num_kv_heads;
  tiles.num_requests = p.num_requests;
  tiles.num_tokens = p.num_tokens;
  tiles.block_ids = block_ids;
  tiles.top_k = p.top_k;
  tiles.joined = p.joined;
  if (cudaError_t const status = launch_join_tiles(tiles, s->max_pages, p.lists, stream))
    return status;
  return launch_invert_blocks(p, blocks, stream);
}
}
