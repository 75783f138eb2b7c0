#pragma once

#include <cstdint>

// The packed step that the attention ops share: which tokens belong to which request, where their
// keys lie. Plain data, no CUDA; packed_tokens.cuh has the device side.
namespace m3::kernels {

constexpr int kHeadSize = 128;       // channels of a query, key, value or index head
constexpr int kBlockSize = 128;      // tokens of a page, which is the MSA block
constexpr int kMaxGroup = 16;        // query heads of a KV head
constexpr int kMaxDecodeLength = 8;  // query tokens of one decode request

struct PackedTokens {              // shapes: R requests, N tokens
  int32_t const* cu_query_lens;    // [R + 1]; the last entry is the number of real tokens
  int32_t const* sequence_length;  // [R], this step's tokens included
  int32_t const* block_offsets;    // [R, max_pages] page ids; -1 is never dereferenced
  int32_t num_requests;            // R
  int32_t num_tokens;              // N, padding included
  int32_t max_pages;
};

}  // namespace m3::kernels
