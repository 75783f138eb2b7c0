#pragma once

#include "kernels/sm90_moe_stages.h"

namespace m3::kernels {

// Lays the workspace out at `base` and returns its bytes; a null base only counts.
size_t sm90_moe_carve(MoeParams const& p, void* base, Sm90MoeWorkspace& ws);

// Floats of the sums of the widest tile.
int64_t sm90_moe_partial_size(int64_t tokens);

}  // namespace m3::kernels
