#pragma once

#include "kernels/paged_prefill.h"

namespace m3::kernels {

// Up to so many blocks that the rows of a tile choose together are faster attended to by all of
// them, with a mask, than block by block: few tokens have few tiles, each of which takes long.
int32_t joined_blocks(int32_t num_tokens, int32_t num_heads, int32_t top_k);

// With so few tokens only tiles of the first joined_blocks of a sequence are joined, by position.
bool joins_by_position(int32_t num_tokens, int32_t num_heads);

// Fills p.joined: the tiles whose rows chose no more than joined_blocks together, the last token's
// own one counted, all of them in front of `end_block`; a tile of fewer tokens as many fewer.
cudaError_t launch_join_tiles(PagedPrefillParams const& p, int32_t end_block, cudaStream_t stream);

}  // namespace m3::kernels
