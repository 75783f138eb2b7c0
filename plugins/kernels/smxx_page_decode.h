#pragma once

#include "kernels/smxx_paged_decode.h"

// The part of launch_selected_decode that serves a few items: a block of threads for each selected
// page. Its blocks are small enough to wait beside those of the kernels that choose the pages.
namespace m3::kernels {

// Whether so few items, one query token and KV head each, of up to top_k pages are served best so.
bool suits_page_decode(int items, int top_k, int processors);

// Needs what launch_selected_decode needs, and suits_page_decode.
cudaError_t launch_page_decode(PagedDecodeParams const& p, cudaStream_t stream);

}  // namespace m3::kernels
