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

// A barrier of all threads of the cluster in two halves. The first half orders nothing but barriers
// initialised by init_exchange.
__device__ inline void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\n" ::: "memory");
#endif
}
__device__ inline void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
#endif
}

// Both halves.
__device__ inline void meet_cluster() {
  cluster_arrive();
  cluster_wait();
}

// A barrier in shared memory that counts the bytes which other blocks store here: one thread
// initialises it and, for each phase, says how many to expect; all others wait.
__device__ inline void init_exchange(uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\n"
      "fence.mbarrier_init.release.cluster;\n" ::"r"(
          static_cast<uint32_t>(__cvta_generic_to_shared(barrier)))
      : "memory");
#endif
}
__device__ inline void expect_exchange(uint64_t* barrier, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(barrier))),
               "r"(bytes)
               : "memory");
#endif
}
__device__ inline void wait_exchange(uint64_t* barrier, int parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred done;\n"
      "wait: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n}" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier))),
      "r"(parity)
      : "memory");
#endif
}

// Stores to where `local` lies in block `rank` of the cluster, counted by `barrier` there.
__device__ inline void store_remote(float4* local, uint64_t* barrier, int rank, float4 value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .b32 to, counter;\n"
      "mapa.shared::cluster.u32 to, %0, %2;\n"
      "mapa.shared::cluster.u32 counter, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%3, %4, %5, %6}, "
      "[counter];\n}\n" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(local))),
      "r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier))), "r"(rank), "f"(value.x),
      "f"(value.y), "f"(value.z), "f"(value.w)
      : "memory");
#endif
}
__device__ inline void store_remote(float2* local, uint64_t* barrier, int rank, float2 value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .b32 to, counter;\n"
      "mapa.shared::cluster.u32 to, %0, %2;\n"
      "mapa.shared::cluster.u32 counter, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [to], {%3, %4}, "
      "[counter];\n}\n" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(local))),
      "r"(static_cast<uint32_t>(__cvta_generic_to_shared(barrier))), "r"(rank), "f"(value.x),
      "f"(value.y)
      : "memory");
#endif
}

}  // namespace m3::kernels
