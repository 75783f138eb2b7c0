#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/sm90_ptx.cuh"

// What an attention kernel needs of sm_90a: wgmma on 128-byte-swizzled tiles, TMA, mbarriers.
namespace m3::kernels::sm90 {

// A tile of rows of 64 bf16 (128 bytes), written by TMA with its 128-byte swizzle; 1024-byte
// aligned. K-major: the rows are M or N and 16 of K lie 32 bytes further. `next_rows`: bytes from
// eight rows to the next eight.
__device__ inline uint64_t row_descriptor(uint32_t address, uint32_t next_rows = 1024) {
  return uint64_t{1} << 62 | uint64_t{next_rows / 16} << 32 | uint64_t{1} << 16 |
         (address & 0x3FFFF) >> 4;
}
// The same tile with its rows as K and its columns as N; columns from 64 on lie `next_columns`
// bytes further, 16 of K 2048 bytes.
__device__ inline uint64_t column_descriptor(uint32_t address, uint32_t next_columns) {
  return uint64_t{1} << 62 | uint64_t{1024 / 16} << 32 | uint64_t{next_columns / 16} << 16 |
         (address & 0x3FFFF) >> 4;
}

// The descriptor of what lies `bytes` further on.
__device__ inline uint64_t advance(uint64_t descriptor, uint32_t bytes) {
  return (descriptor & 0xFFFFFFFF00000000) | (static_cast<uint32_t>(descriptor) + bytes / 16);
}

__device__ inline void fence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}
__device__ inline void commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
template <int kPending>
__device__ inline void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}
// Keeps the compiler from using accumulators before the wait in front of it.
__device__ inline void pin(float (&d)[64]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define M3_D(i)                                                                               \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define M3_D_ALL M3_D(0), M3_D(8), M3_D(16), M3_D(24), M3_D(32), M3_D(40), M3_D(48), M3_D(56)
#define M3_NEW(i)                                                                             \
  "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3]), "=f"(d[i + 4]), "=f"(d[i + 5]), \
      "=f"(d[i + 6]), "=f"(d[i + 7])
#define M3_NEW_ALL \
  M3_NEW(0), M3_NEW(8), M3_NEW(16), M3_NEW(24), M3_NEW(32), M3_NEW(40), M3_NEW(48), M3_NEW(56)
#define M3_D_NAMES                                                                              \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "  \
  "%38, "                                                                                       \
  "%39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, "  \
  "%57, "                                                                                       \
  "%58, %59, %60, %61, %62, %63}"

// d [64, 128] = a b^T (+ d), both K-major in shared memory; K = 16.
__device__ inline void multiply_rows(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " M3_D_NAMES
      ", %64, %65, p, 1, 1, 0, 0;\n}\n"
      : M3_D_ALL
      : "l"(a), "l"(b), "r"(accumulate));
}

// d [64, 128] = a b (+ d) with a in registers, as mma's fragments, and b by column_descriptor;
// K = 16.
__device__ inline void multiply_columns(float (&d)[64], uint32_t const* a, uint64_t b,
                                        int accumulate = 1) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " M3_D_NAMES
      ", {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"
      : M3_D_ALL
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

// The first of a sum: d [64, 128] = a b^T and a b. What d held before does not matter to the
// compiler either, so its registers are free until here.
__device__ inline void begin_rows(float (&d)[64], uint64_t a, uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " M3_D_NAMES
      ", %64, %65, p, 1, 1, 0, 0;\n}\n"
      : M3_NEW_ALL
      : "l"(a), "l"(b));
}
__device__ inline void begin_columns(float (&d)[64], uint32_t const* a, uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " M3_D_NAMES
      ", {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"
      : M3_NEW_ALL
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// d [64, 128] = a b^T (+ d) with a in registers, as mma's fragments, and b K-major; K = 16.
__device__ inline void multiply_rows(float (&d)[64], uint32_t const* a, uint64_t b,
                                     int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " M3_D_NAMES
      ", {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}\n"
      : M3_D_ALL
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

#undef M3_NEW
#undef M3_NEW_ALL
#undef M3_D
#undef M3_D_ALL
#undef M3_D_NAMES

using ptx::barrier_arrive;
using ptx::barrier_expect;
using ptx::barrier_init;
using ptx::barrier_wait;

// Which of a ring of buffers is next, and the parity of its barriers.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

__device__ inline void load_tile(uint32_t to, CUtensorMap const* map, uint32_t barrier, int x,
                                 int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5}], [%2];\n" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ inline void load_tile(uint32_t to, CUtensorMap const* map, uint32_t barrier, int x,
                                 int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5, %6}], [%2];\n" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// Named barriers among some of the block's threads.
__device__ inline void sync_threads(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void arrive_threads(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace m3::kernels::sm90
