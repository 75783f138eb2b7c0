#pragma once

#include "kernels/carver.h"
#include "kernels/paged_prefill.h"

namespace m3::kernels {

// Up to so many blocks that the rows of a tile choose together are faster attended to by all of
// them, with a mask, than block by block: few tokens have few tiles, each of which takes long.
int32_t joined_blocks(int32_t num_tokens, int32_t num_heads, int32_t top_k);

// Room for the flags of these tiles.
JoinedTiles place_joined_tiles(Carver& carver, int32_t num_heads, int32_t num_kv_heads,
                               int32_t num_tokens, int32_t num_requests);

// Sets the end position and, with so few tokens that only tiles of the first joined_blocks of a
// sequence are joined, takes the flags away.
void limit_joined_tiles(JoinedTiles& joined, int32_t num_tokens, int32_t num_heads, int32_t top_k);

// Fills the flags of p.joined, if there are any: of 16 neighbouring tiles those whose rows chose no
// more than joined_blocks together, the last token's own one counted, all of them in front of
// `end_block`, if the 16 would take less time joined than block by block. `lists`: of InvertParams.
// Tiles in front of block top_k are always joined.
cudaError_t launch_join_tiles(PagedPrefillParams const& p, int32_t end_block, int32_t lists,
                              cudaStream_t stream);

}  // namespace m3::kernels
