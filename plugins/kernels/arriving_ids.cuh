#pragma once

#include "kernels/global_memory.cuh"

// Block ids that a kernel behind their selection takes one by one while they are written, instead
// of waiting for the selection's end. The selection first marks a row with ids that do not exist,
// behind the end of all kernels in front of it and before any kernel behind it starts. So whoever
// finds a row marked may use what those kernels wrote, and the ids as they come. Rows that are not
// marked may be of another step: there the end of the selection must be waited for, and so it must
// in any case before results are written.
namespace m3::kernels {

constexpr int32_t kIdToCome = static_cast<int32_t>(0x9e3779b9);

// A lane's part of a row of up to 32, for ids_come below. Nothing waits for it yet.
__device__ inline int32_t look_for_mark(int32_t const* ids, int32_t top_k) {
  int32_t const lane = threadIdx.x % 32;
  if (lane >= top_k) return kIdToCome;
  return static_cast<int32_t>(load_relaxed(reinterpret_cast<uint32_t const*>(ids + lane)));
}
__device__ inline bool ids_come(int32_t seen) {
  return __all_sync(~0u, seen == kIdToCome);
}

__device__ inline int32_t wait_for_id(int32_t const* id) {
  int32_t x;
  do x = load_acquire(id);
  while (x == kIdToCome);
  return x;
}

}  // namespace m3::kernels
