#pragma once

#include "kernels/smxx_invert_blocks.h"

// The part of launch_invert_blocks that serves small chunks on GPUs with thread block clusters: one
// kernel, one cluster.
namespace m3::kernels {

bool takes_invert_chunk(InvertParams const& p);
cudaError_t launch_invert_chunk(InvertParams const& p, InvertedBlocks const& blocks,
                                cudaStream_t stream);

}  // namespace m3::kernels
