#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

// The instructions of a bf16 tensor-core kernel that every GPU from sm_80 on executes.
namespace m3::kernels {

__device__ inline uint32_t shared_address(void const* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes, past L1; zeros when not `valid` (the source is not read then).
__device__ inline void copy_async(uint32_t to, void const* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}

__device__ inline void commit_copies() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

// Waits until at most `kPending` of this thread's groups are still on their way.
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Waits for the oldest of this thread's last `groups` (1 to 3) groups.
__device__ inline void wait_for_oldest(int groups) {
  switch (groups) {
    case 1:
      return wait_copies<0>();
    case 2:
      return wait_copies<1>();
    default:
      return wait_copies<2>();
  }
}

// 16 bytes of zeros.
__device__ inline void store_zeros(uint32_t to) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};\n" ::"r"(to), "r"(0) : "memory");
}

__device__ inline void load_shared(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Four 8 x 8 matrices; lane i gives the address of a row of 16 bytes.
__device__ inline void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// c += a b with a [16, 16] and b [16, 8]. Lane i holds c[i / 4 (+ 8)][2 (i % 4) + 0, 1].
__device__ inline void multiply_add(float (&c)[4], uint32_t const (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same of f16.
__device__ inline void multiply_add_half(float (&c)[4], uint32_t const (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline uint32_t pack_bf16(float low, float high) {
  __nv_bfloat162 const pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<uint32_t const&>(pair);
}

__device__ inline uint32_t pack_half(float low, float high) {
  __half2 const pair = __floats2half2_rn(low, high);
  return reinterpret_cast<uint32_t const&>(pair);
}

// 2^x in one instruction; exp2f spends three more on results below 2^-126.
__device__ inline float exp2_flushed(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// Maximum and sum over the four lanes that share a row of a fragment.
__device__ inline float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Byte offset of 16-byte chunk `chunk` of `row` in a tile of kChunks (8 or 16) chunks a row. The
// exclusive or spreads the eight rows of a matrix over all banks.
template <int kChunks>
__device__ inline uint32_t swizzled(int row, int chunk) {
  return static_cast<uint32_t>(row * kChunks + (chunk ^ (row & 7))) * 16;
}

}  // namespace m3::kernels
