#pragma once

#include <cstdint>

// wgmma.mma_async m64nNk16, bf16 x bf16 -> fp32, both operands in shared memory, K-major.
namespace m3::kernels::wgmma {

// Descriptor of a tile whose rows are 128 bytes of K, swizzled by TMA's 128-byte pattern; `shared`
// is 1024-byte aligned. K advances by 16 elements with +2.
__device__ inline uint64_t descriptor(uint32_t shared) {
  constexpr uint64_t SWIZZLE_128 = uint64_t{1} << 62;
  constexpr uint64_t EIGHT_ROWS = uint64_t{1024 / 16} << 32;
  return SWIZZLE_128 | EIGHT_ROWS | uint64_t{1} << 16 | (shared & 0x3FFFF) >> 4;
}

__device__ inline void fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int GROUPS>
__device__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}

// The accumulators as asm operands: 4 registers for 8 columns.
#define M3_REGS_1 "%0, %1, %2, %3"
#define M3_REGS_2 M3_REGS_1 ", %4, %5, %6, %7"
#define M3_REGS_3 M3_REGS_2 ", %8, %9, %10, %11"
#define M3_REGS_4 M3_REGS_3 ", %12, %13, %14, %15"
#define M3_REGS_5 M3_REGS_4 ", %16, %17, %18, %19"
#define M3_REGS_6 M3_REGS_5 ", %20, %21, %22, %23"
#define M3_REGS_7 M3_REGS_6 ", %24, %25, %26, %27"
#define M3_REGS_8 M3_REGS_7 ", %28, %29, %30, %31"
#define M3_REGS_9 M3_REGS_8 ", %32, %33, %34, %35"
#define M3_REGS_10 M3_REGS_9 ", %36, %37, %38, %39"
#define M3_REGS_11 M3_REGS_10 ", %40, %41, %42, %43"
#define M3_REGS_12 M3_REGS_11 ", %44, %45, %46, %47"
#define M3_REGS_13 M3_REGS_12 ", %48, %49, %50, %51"
#define M3_REGS_14 M3_REGS_13 ", %52, %53, %54, %55"
#define M3_REGS_15 M3_REGS_14 ", %56, %57, %58, %59"
#define M3_REGS_16 M3_REGS_15 ", %60, %61, %62, %63"
#define M3_REGS_17 M3_REGS_16 ", %64, %65, %66, %67"
#define M3_REGS_18 M3_REGS_17 ", %68, %69, %70, %71"
#define M3_REGS_19 M3_REGS_18 ", %72, %73, %74, %75"
#define M3_REGS_20 M3_REGS_19 ", %76, %77, %78, %79"
#define M3_ACC(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define M3_ACCS_1 M3_ACC(0)
#define M3_ACCS_2 M3_ACCS_1, M3_ACC(4)
#define M3_ACCS_3 M3_ACCS_2, M3_ACC(8)
#define M3_ACCS_4 M3_ACCS_3, M3_ACC(12)
#define M3_ACCS_5 M3_ACCS_4, M3_ACC(16)
#define M3_ACCS_6 M3_ACCS_5, M3_ACC(20)
#define M3_ACCS_7 M3_ACCS_6, M3_ACC(24)
#define M3_ACCS_8 M3_ACCS_7, M3_ACC(28)
#define M3_ACCS_9 M3_ACCS_8, M3_ACC(32)
#define M3_ACCS_10 M3_ACCS_9, M3_ACC(36)
#define M3_ACCS_11 M3_ACCS_10, M3_ACC(40)
#define M3_ACCS_12 M3_ACCS_11, M3_ACC(44)
#define M3_ACCS_13 M3_ACCS_12, M3_ACC(48)
#define M3_ACCS_14 M3_ACCS_13, M3_ACC(52)
#define M3_ACCS_15 M3_ACCS_14, M3_ACC(56)
#define M3_ACCS_16 M3_ACCS_15, M3_ACC(60)
#define M3_ACCS_17 M3_ACCS_16, M3_ACC(64)
#define M3_ACCS_18 M3_ACCS_17, M3_ACC(68)
#define M3_ACCS_19 M3_ACCS_18, M3_ACC(72)
#define M3_ACCS_20 M3_ACCS_19, M3_ACC(76)

// d += a * b. a: 64 rows of weights, b: N rows of tokens.
template <int N>
__device__ void mma(float (&d)[N / 2], uint64_t a, uint64_t b);

#define M3_WGMMA(N, EIGHTS, A, B)                                                              \
  template <>                                                                                  \
  __device__ inline void mma<N>(float (&d)[N / 2], uint64_t a, uint64_t b) {                   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" M3_REGS_##EIGHTS \
                 "}, %" #A ", %" #B ", 1, 1, 1, 0, 0;"                                         \
                 : M3_ACCS_##EIGHTS                                                            \
                 : "l"(a), "l"(b));                                                            \
  }

M3_WGMMA(8, 1, 4, 5)
M3_WGMMA(16, 2, 8, 9)
M3_WGMMA(32, 4, 16, 17)
M3_WGMMA(48, 6, 24, 25)
M3_WGMMA(64, 8, 32, 33)
M3_WGMMA(80, 10, 40, 41)
M3_WGMMA(96, 12, 48, 49)
M3_WGMMA(112, 14, 56, 57)
M3_WGMMA(120, 15, 60, 61)
M3_WGMMA(128, 16, 64, 65)
M3_WGMMA(136, 17, 68, 69)
M3_WGMMA(144, 18, 72, 73)
M3_WGMMA(152, 19, 76, 77)
M3_WGMMA(160, 20, 80, 81)

#undef M3_WGMMA

}  // namespace m3::kernels::wgmma
