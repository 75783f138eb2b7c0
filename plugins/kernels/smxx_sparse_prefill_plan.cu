#include <algorithm>
#include <cstdint>

#include "kernels/smxx_join_tiles.h"
#include "kernels/sparse_prefill_plan.h"

namespace m3::kernels {
namespace {

constexpr int64_t PARTIAL_BYTES = 1100000000;  // of a round, about
constexpr int32_t MAX_ROUND_TOKENS = 16384;
// Of sparse_route and shares_blocks: tokens, and queries of a block on average.
constexpr int32_t FEW_TOKENS = 64;
constexpr float FEW_QUERIES = 4.f;
constexpr float SOME_QUERIES = 16.f;
// Tiles that take as long as it takes to begin an item, where items have more of them.
constexpr int32_t LEAST_WORK = 3;

int64_t partial_bytes(int64_t tokens, int64_t heads, int32_t group, int32_t top_k) {
  return tokens * heads * top_k * group * kHeadSize * 2;
}

// If all blocks of the page tables exist and are chosen alike.
float queries_of_block(int32_t num_tokens, int32_t num_requests, int32_t max_pages, int32_t top_k) {
  return static_cast<float>(num_tokens) * top_k / num_requests / max_pages;
}

// Where the arrays lie, of `tokens` tokens in rounds of so many; the partial results behind all
// others, up to the workspace's end.
SparsePrefillRound place(Carver& carver, int32_t num_heads, int32_t num_kv_heads,
                         int32_t all_tokens, int32_t tokens, int32_t num_requests,
                         int32_t max_pages, int32_t top_k, int32_t lists, JoinedTiles& joined) {
  joined = place_joined_tiles(carver, num_heads, num_kv_heads, all_tokens, num_requests);
  SparsePrefillRound round{};
  round.blocks =
      place_inverted_blocks(carver, tokens, num_kv_heads, num_requests, max_pages, top_k, lists);
  carver.take(round.lse, int64_t{num_heads} * tokens * top_k);
  carver.take_bytes(round.partials, 0);
  return round;
}

}  // namespace

bool takes_sparse_prefill(int32_t num_heads, int32_t num_kv_heads, int32_t num_requests,
                          int32_t top_k) {
  return (num_heads == 8 * num_kv_heads || num_heads == 16 * num_kv_heads) &&
         num_requests <= kMaxPrefillRequests && top_k >= 1 && top_k <= kMaxTopK;
}

SparseRoute sparse_route(int32_t num_tokens, int32_t num_heads, int32_t num_requests,
                         int32_t max_pages, int32_t top_k) {
  if (num_requests > 0 && num_tokens <= FEW_TOKENS &&
      queries_of_block(num_tokens, num_requests, max_pages, top_k) <= FEW_QUERIES) {
    return SparseRoute::kRows;
  }
  return max_pages <= joined_blocks(num_tokens, num_heads, top_k) ? SparseRoute::kDense
                                                                  : SparseRoute::kBlocks;
}

bool shares_blocks(SparsePrefillParams const& p, int32_t num_tokens) {
  return queries_of_block(num_tokens, p.num_requests, p.tokens.max_pages, p.top_k) > SOME_QUERIES;
}

SparsePrefillRounds sparse_prefill_rounds(int32_t num_tokens, int32_t num_heads,
                                          int32_t num_kv_heads, int32_t top_k) {
  int32_t const group = num_heads / num_kv_heads;
  int64_t const fitting = PARTIAL_BYTES / partial_bytes(1, 1, group, top_k);
  auto const tokens =
      static_cast<int32_t>(std::min<int64_t>({num_tokens, MAX_ROUND_TOKENS, fitting}));
  if (tokens == 0) return {0, num_kv_heads};
  return {tokens, static_cast<int32_t>(std::min<int64_t>(num_kv_heads, fitting / tokens))};
}

size_t sparse_prefill_workspace(int32_t num_tokens, int32_t num_heads, int32_t num_kv_heads,
                                int32_t num_requests, int32_t max_pages, int32_t top_k) {
  int32_t const group = num_heads / num_kv_heads;
  int32_t const tokens = sparse_prefill_rounds(num_tokens, num_heads, num_kv_heads, top_k).tokens;
  int32_t const requests = std::min(num_requests, kMaxPrefillRequests);  // more are not taken
  Carver carver(nullptr);
  JoinedTiles joined;
  place(carver, num_heads, num_kv_heads, num_tokens, tokens, requests, max_pages, top_k, kMostLists,
        joined);
  return carver.used() +
         std::min(PARTIAL_BYTES, partial_bytes(num_tokens, num_kv_heads, group, top_k));
}

cudaError_t run_sparse_prefill(SparsePrefillParams const& p, SparsePrefillRounds rounds,
                               void* workspace, cudaStream_t stream, LaunchSparseRound attend,
                               LaunchTiles attend_tiles, int32_t end_block, int32_t lists) {
  if (p.num_tokens == 0) return cudaSuccess;
  if (!takes_sparse_prefill(p.num_heads, p.num_kv_heads, p.num_requests, p.top_k)) {
    return cudaErrorInvalidValue;
  }
  int32_t const group = p.num_heads / p.num_kv_heads;
  Carver carver(workspace);
  JoinedTiles joined;
  SparsePrefillRound round = place(carver, p.num_heads, p.num_kv_heads, p.num_tokens, rounds.tokens,
                                   p.num_requests, p.tokens.max_pages, p.top_k, lists, joined);
  float* const lse = round.lse;
  if (attend_tiles == nullptr) {
    joined.flags = nullptr;
    joined.end_position = -kAllPositions;
  } else {
    limit_joined_tiles(joined, p.num_tokens, p.num_heads, p.top_k);
  }
  PagedPrefillParams const tiles{p, joined};
  cudaError_t status = launch_join_tiles(tiles, end_block, lists, stream);
  if (status != cudaSuccess) return status;
  for (int32_t token = 0; token < p.num_tokens; token += rounds.tokens) {
    round.first_token = token;
    round.num_tokens = std::min(rounds.tokens, p.num_tokens - token);
    InvertParams invert{};
    invert.tokens = p.tokens;
    invert.block_ids = p.block_ids;
    invert.num_kv_heads = p.num_kv_heads;
    invert.num_requests = p.num_requests;
    invert.first_token = round.first_token;
    invert.num_tokens = round.num_tokens;
    invert.top_k = p.top_k;
    invert.tile_queries = kSparseTileRows / group;
    invert.group = group;
    invert.lists = lists;
    invert.least_work = lists == 2 && shares_blocks(p, round.num_tokens) ? LEAST_WORK : 1;
    invert.joined = joined;
    invert.behind_join = token == 0 && joined.flags != nullptr;
    invert.lse = lse;
    status = launch_invert_blocks(invert, round.blocks, stream);
    if (status != cudaSuccess) return status;
    if (token == 0 && attend_tiles != nullptr && p.num_requests > 0) {
      status = attend_tiles(tiles, stream);
      if (status != cudaSuccess) return status;
    }
    for (int32_t head = 0; head < p.num_kv_heads; head += rounds.heads) {
      round.first_head = head;
      round.num_heads = std::min(rounds.heads, p.num_kv_heads - head);
      round.lse = lse + int64_t{head} * round.num_tokens * p.top_k * group;
      if (p.num_requests > 0) status = attend(p, round, stream);
      if (status != cudaSuccess) return status;
      MergeParams merge{};
      merge.tokens = p.tokens;
      merge.partials = round.partials;
      merge.lse = round.lse;
      merge.out = p.out;
      merge.num_requests = p.num_requests;
      merge.first_token = round.first_token;
      merge.num_tokens = round.num_tokens;
      merge.num_heads = p.num_heads;
      merge.first_kv_head = head;
      merge.num_kv_heads = round.num_heads;
      merge.group = group;
      merge.top_k = p.top_k;
      status = launch_merge_partials(merge, stream);
      if (status != cudaSuccess) return status;
    }
  }
  return cudaSuccess;
}

}  // namespace m3::kernels
