#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "kernels/carver.h"
#include "kernels/packed_tokens.h"
#include "kernels/paged_prefill.h"

// Turns the blocks of each query into the queries of each block.
namespace m3::kernels {

constexpr int kMaxPrefillRequests = 4096;

struct InvertParams {
  PackedTokens tokens;
  int32_t const* block_ids;  // [Hkv, N, top_k]
  int32_t num_kv_heads;
  int32_t num_requests;  // context requests, the first ones
  int32_t first_token;   // of the tokens whose blocks are inverted
  int32_t num_tokens;
  int32_t top_k;
  int32_t tile_queries;  // queries that an attention tile takes
  int32_t lists;         // of a block: 2 if a query may take it together with the next one, else 1
  int32_t least_work;    // of an item, where a tile's work is the number of its blocks
  JoinedTiles joined;    // whose rows are left out, as if they had chosen no block
  bool behind_join;      // launch_join_tiles is in front in the stream and makes flags
  int32_t group;         // query heads of a KV head
  float* lse;            // [Hkv, num_tokens, top_k, group]: -inf where no block is to be read, +inf
                         // in the first place of a row of a joined tile
};

// A block of a KV head that at least one query chose, or two neighbouring ones.
struct KvItem {
  int32_t page;
  int16_t head;
  int16_t continues;    // whether the item before ends with this one's first block
  int32_t first_query;  // in InvertedBlocks::queries
  int32_t num_queries;
  int32_t first_work;   // work of the items before this one
  int32_t visible;      // keys that exist, at most 128 a block
  int32_t limit;        // + token = keys of the item at or before the token; may exceed those
  int32_t second_page;  // -1: one block
};

struct alignas(16) ListSums {  // of lists, or of all that come before some
  int32_t queries, work, items, unused;
};

// In device memory. Items are ordered by head, request and block; queries of an item by token.
struct InvertedBlocks {
  int32_t* queries;  // (token - first_token) * top_k + place of the block in the token's list
  KvItem* items;
  ListSums* heads;       // [Hkv + 1] before those of a head
  int32_t* parts_taken;  // [Hkv], 0: for the attention
  // What the three kernels tell each other, of groups of 32 neighbouring lists of a head:
  int32_t* first_group;  // [num_requests + 1] within a head; the last entry is `groups`
  uint16_t* counts;      // [Hkv, tiles, pitch] queries of a tile of tokens, then of those before it
  uint16_t* ranks;       // [Hkv, num_tokens, top_k] among the queries of the tile and list
  int2* blocks;          // [Hkv * groups * 32], of a list: queries; those before it in its group
  ListSums* groups;      // [Hkv * groups]
};

// The arrays' content is undefined.
InvertedBlocks place_inverted_blocks(Carver& carver, int32_t num_tokens, int32_t num_kv_heads,
                                     int32_t num_requests, int32_t max_pages, int32_t top_k,
                                     int32_t lists);

cudaError_t launch_invert_blocks(InvertParams const& p, InvertedBlocks const& blocks,
                                 cudaStream_t stream);

}  // namespace m3::kernels
