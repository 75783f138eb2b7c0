#pragma once

#include "kernels/paged_prefill.h"
#include "kernels/smxx_invert_blocks.h"
#include "kernels/smxx_merge_partials.h"
#include "kernels/sparse_prefill.h"

namespace m3::kernels {

// Tiles of 64 query rows: so many queries of a block, each with the query heads of a KV head.
constexpr int kSparseTileRows = 64;

// InvertParams::lists, at most.
constexpr int32_t kMostLists = 2;

// What an attention kernel computes at once: the partial results of some tokens and KV heads, as
// MergeParams describes them.
struct SparsePrefillRound {
  InvertedBlocks blocks;  // of all KV heads
  void* partials;
  float* lse;
  int32_t first_token, num_tokens;
  int32_t first_head, num_heads;  // KV heads
};

using LaunchSparseRound = cudaError_t (*)(SparsePrefillParams const&, SparsePrefillRound const&,
                                          cudaStream_t);

using LaunchTiles = cudaError_t (*)(PagedPrefillParams const&, cudaStream_t);

// Whether so many tokens are likely to meet in the blocks of the page tables.
bool shares_blocks(SparsePrefillParams const& p, int32_t num_tokens);

// Inverts, attends and merges, round by round. `lists`: of InvertParams. Joined tiles, of blocks in
// front of `end_block`, go to `attend_tiles`, which may be null.
cudaError_t run_sparse_prefill(SparsePrefillParams const& p, SparsePrefillRounds rounds,
                               void* workspace, cudaStream_t stream, LaunchSparseRound attend,
                               LaunchTiles attend_tiles, int32_t end_block, int32_t lists);

}  // namespace m3::kernels
