#pragma once

#include <cuda_runtime_api.h>

#include "kernels/packed_tokens.h"

namespace m3::kernels {

// Partial results lie as the attention kernels' registers hold them. A unit is eight query heads of
// a (token, block) pair, 2 KB: [4][32 lanes][8]; element e of lane l of quarter j is channel
// 32 j + 8 (e / 2) + 2 (l % 4) + e % 2 of head l / 4.
constexpr int kUnitHeads = 8;
constexpr int kUnitBytes = kUnitHeads * kHeadSize * 2;

struct MergeParams {
  PackedTokens tokens;
  void const*
      partials;      // bf16 units [heads, num_tokens, top_k, group / 8], each softmax-normalised
  float const* lse;  // [heads, num_tokens, top_k, group] base 2; -inf: the partial is not read,
                     // +inf: the row is not written
  void* out;         // bf16 [N, Hq * D]
  int32_t num_requests;  // context requests; tokens behind theirs are padding
  int32_t first_token;
  int32_t num_tokens;
  int32_t num_heads;  // query heads, Hq
  int32_t first_kv_head;
  int32_t num_kv_heads;  // of this round
  int32_t group;         // query heads of a KV head, 8 or 16
  int32_t top_k;
};

// Sums a row's partials, weighted by their part of the softmax's sum.
cudaError_t launch_merge_partials(MergeParams const& p, cudaStream_t stream);

}  // namespace m3::kernels
