#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

// Thread block clusters: blocks that run together and write into each other's shared memory. In
// code for GPUs without them every block is a cluster of its own.
namespace m3::kernels {

__device__ inline int cluster_size() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  int size;
  asm("mov.u32 %0, %%cluster_nctaid.x;\n" : "=r"(size));
  return size;
#else
  return 1;
#endif
}

__device__ inline int cluster_rank() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank));
  return rank;
#else
  return 0;
#endif
}

// A barrier of all threads of the cluster in two halves: what was written before arriving is
// visible behind the wait, shared memory of the other blocks included.
__device__ inline void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
#endif
}
__device__ inline void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
#endif
}

// Writes to where `local`, in shared memory, lies in block `rank` of the cluster.
__device__ inline void store_remote(float4* local, int rank, float4 value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.v4.f32 [remote], {%2, %3, %4, %5};\n}\n" ::"r"(
          static_cast<uint32_t>(__cvta_generic_to_shared(local))),
      "r"(rank), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
      : "memory");
#endif
}
__device__ inline void store_remote(float2* local, int rank, float2 value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.v2.f32 [remote], {%2, %3};\n}\n" ::"r"(
          static_cast<uint32_t>(__cvta_generic_to_shared(local))),
      "r"(rank), "f"(value.x), "f"(value.y)
      : "memory");
#endif
}

}  // namespace m3::kernels
