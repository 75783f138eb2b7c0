#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace m3::kernels {

// Brings the line of an address into L2.
__device__ inline void prefetch(void const* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Past L1, where it may lie from before another thread block wrote it.
__device__ inline uint32_t load_relaxed(uint32_t const* from) {
  uint32_t x;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];\n" : "=r"(x) : "l"(from) : "memory");
  return x;
}

// Likewise; what its writer wrote before, with a release, is visible after it.
__device__ inline int32_t load_acquire(int32_t const* from) {
  int32_t x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];\n" : "=r"(x) : "l"(from) : "memory");
  return x;
}

}  // namespace m3::kernels
