#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

// Tiles that the copy engine of GPUs from sm_90 on brings into shared memory, counted by a barrier
// there. Other code holds none of it and must not call it.
namespace m3::kernels {

// One thread, before a barrier of the block.
__device__ inline void init_bulk_barrier(uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\n"
      "fence.mbarrier_init.release.cluster;\n" ::"r"(barrier)
      : "memory");
#endif
}

__device__ inline void expect_bulk(uint32_t barrier, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}

__device__ inline void wait_bulk(uint32_t barrier, int parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred done;\n"
      "wait: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
#endif
}

// Brings the map near before its first use.
__device__ inline void prefetch_map(CUtensorMap const* map) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
#endif
}

// A box of a tensor of three dimensions.
__device__ inline void copy_bulk(uint32_t to, CUtensorMap const* from, uint32_t barrier, int x,
                                 int y, int z) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5}], [%2];\n" ::"r"(to),
      "l"(from), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
#endif
}

// Contiguous bytes, a multiple of 16.
__device__ inline void copy_bulk(uint32_t to, void const* from, uint32_t barrier, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
#endif
}

// Orders what this thread wrote to shared memory before copies that are started behind the next
// barrier.
__device__ inline void fence_bulk() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
#endif
}

}  // namespace m3::kernels
