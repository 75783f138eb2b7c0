#pragma once

#include "kernels/smxx_paged_decode.h"

// The part of launch_paged_decode that serves selections on GPUs with thread block clusters: an
// item, one query token and KV head, goes to a cluster and leaves nothing to join in device memory.
namespace m3::kernels {

// Whether this GPU and this code have clusters and the copy engine.
cudaError_t has_clusters(bool& result);

// Needs block_ids and has_clusters. No workspace. Ids may still be written by the kernel in front
// (arriving_ids.cuh); then q and the cache were written by kernels in front of that.
cudaError_t launch_selected_decode(PagedDecodeParams const& p, cudaStream_t stream);

}  // namespace m3::kernels
