#pragma once

#include <cuda_runtime_api.h>

#include "kernels/packed_tokens.h"

namespace m3::kernels {

constexpr int kPrefillRows = 128;  // query rows of a tile

constexpr int kMaxTopK = 32;    // blocks that a row may choose
constexpr int kMaxJoined = 32;  // blocks that the rows of a tile may choose together

// Which tiles of rows that select are joined: attended to with all their rows' blocks at once.
// Others are left alone.
struct JoinedTiles {
  uint8_t* flags;         // [slots, Hkv]: 1 for joined ones; null: those in front of end_position
  int32_t slots, tokens;  // prefill_slots; of a tile
  int32_t end_position;
};
constexpr int32_t kAllPositions = 1 << 30;

struct ContextRows {  // shapes: N tokens, P pages, B = 128, D = 128
  PackedTokens tokens;
  void const* q;         // bf16 [N, Hq, D]
  void const* kv_cache;  // bf16, or e4m3 where a kernel takes it, [P, 2, B, Hkv, D]
  void* out;             // bf16 [N, Hq * D]; zero for padding and rows that see no block
  int32_t num_heads;     // Hq = Hkv times 1 .. 16
  int32_t num_kv_heads;  // Hkv
  int32_t num_pages;     // P
  int32_t num_requests;  // the first ones of the step, whose tokens these are:
  int32_t num_tokens;    // the first ones of the step, padding included
  float softmax_scale;

  // [Hkv, N, top_k] logical blocks, none twice; -1 anywhere is skipped. Null: all blocks.
  int32_t const* block_ids;
  int32_t top_k;  // up to kMaxTopK
};

struct PagedPrefillParams : ContextRows {
  JoinedTiles joined{};
};

// Causal attention of context rows over their request's pages, the chunk itself included.
cudaError_t launch_smxx_paged_prefill(PagedPrefillParams const& p, cudaStream_t stream);

// The same with wgmma and TMA, for compute capability 9.0 and 1, 2, 4, 8 or 16 query heads a KV
// head.
bool has_sm90_paged_prefill(int32_t num_heads, int32_t num_kv_heads);
cudaError_t launch_sm90_paged_prefill(PagedPrefillParams const& p, cudaStream_t stream);

}  // namespace m3::kernels
