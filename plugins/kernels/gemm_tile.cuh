#pragma once

#include <mma.h>

#include <type_traits>

#include "kernels/numeric.cuh"

// One 64 x 64 tile of a[rows, k] * b[cols, k]^T, fp32 sums, by a block of 128 threads. bf16 goes
// through the tensor cores (exact products), float32 through plain FMAs (no TF32).
namespace m3::kernels {

template <class T>
struct GemmTile {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, __nv_bfloat16>,
                "the tile multiplies float32 or bf16");
  static constexpr int ROWS = 64;
  static constexpr int COLS = 64;
  static constexpr int DEPTH = 32;
  static constexpr int THREADS = 128;
  static constexpr bool kTensorCores = !std::is_same_v<T, float>;
  // Leading dimension in shared memory: 16-byte rows for wmma, an odd one against bank conflicts.
  static constexpr int LD = kTensorCores ? DEPTH + 8 : DEPTH + 1;
  static constexpr int SUM_LD = COLS + 4;
  static constexpr int PER_LOAD = 16 / sizeof(T);
  static constexpr int LOADS = ROWS * DEPTH / (THREADS * PER_LOAD);

  struct Operands {
    T a[ROWS * LD];
    T b[COLS * LD];
  };
  union Shared {
    alignas(128) Operands operands;
    float sums[ROWS * SUM_LD];
  };

  // Reads 16 bytes of a row; zeros for a null row and beyond k.
  __device__ static void load(T const* row, int64_t column, int64_t k, bool vector, T* values) {
    if (row != nullptr && vector && column + PER_LOAD <= k) {
      *reinterpret_cast<uint4*>(values) = *reinterpret_cast<uint4 const*>(row + column);
      return;
    }
#pragma unroll
    for (int i = 0; i < PER_LOAD; ++i) {
      bool const inside = row != nullptr && column + i < k;
      values[i] = inside ? row[column + i] : from_float<T>(0.0f);
    }
  }

  // Fills shared.sums. a_row(r) and b_row(c) give the address of row r of a and of b, or nullptr
  // for a row of zeros; `vector` says that every row lies 16-byte aligned.
  template <class RowA, class RowB>
  __device__ static void run(Shared& shared, int64_t k, bool vector, RowA a_row, RowB b_row) {
    constexpr int LOADS_PER_ROW = DEPTH / PER_LOAD;
    alignas(16) T a_next[LOADS][PER_LOAD];
    alignas(16) T b_next[LOADS][PER_LOAD];
    T const* a_rows[LOADS];
    T const* b_rows[LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      int const row = (threadIdx.x + i * THREADS) / LOADS_PER_ROW;
      a_rows[i] = a_row(row);
      b_rows[i] = b_row(row);
    }
    auto fetch = [&](int64_t depth) {
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        int64_t const column = depth + (threadIdx.x + i * THREADS) % LOADS_PER_ROW * PER_LOAD;
        load(a_rows[i], column, k, vector, a_next[i]);
        load(b_rows[i], column, k, vector, b_next[i]);
      }
    };

    Sums sums;
    sums.clear();
    fetch(0);
    for (int64_t depth = 0; depth < k; depth += DEPTH) {
      __syncthreads();  // the operands of the previous step have been read
#pragma unroll
      for (int i = 0; i < LOADS; ++i) {
        int const load_index = threadIdx.x + i * THREADS;
        int const at = load_index / LOADS_PER_ROW * LD + load_index % LOADS_PER_ROW * PER_LOAD;
        store(&shared.operands.a[at], a_next[i]);
        store(&shared.operands.b[at], b_next[i]);
      }
      __syncthreads();  // the operands are complete
      if (depth + DEPTH < k) fetch(depth + DEPTH);
      sums.multiply(shared.operands);
    }
    __syncthreads();  // the operands have been read: sums share their memory
    sums.write(shared.sums);
    __syncthreads();  // the sums are complete
  }

 private:
  __device__ static void store(T* to, T const* values) {
    if constexpr (kTensorCores) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<uint4 const*>(values);
    } else {
#pragma unroll
      for (int i = 0; i < PER_LOAD; ++i) to[i] = values[i];
    }
  }

  // Four warps, 2 x 2, 32 x 32 each.
  struct TensorCoreSums {
    nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> sums[2][2];

    __device__ void clear() {
      for (auto& row : sums) {
        for (auto& sum : row) nvcuda::wmma::fill_fragment(sum, 0.0f);
      }
    }
    __device__ void multiply(Operands const& operands) {
      using namespace nvcuda::wmma;
      int const row = threadIdx.x / 32 / 2 * 32;
      int const col = threadIdx.x / 32 % 2 * 32;
#pragma unroll
      for (int d = 0; d < DEPTH; d += 16) {
        fragment<matrix_a, 16, 16, 16, T, row_major> a[2];
        fragment<matrix_b, 16, 16, 16, T, col_major> b[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          load_matrix_sync(a[i], &operands.a[(row + 16 * i) * LD + d], LD);
          load_matrix_sync(b[i], &operands.b[(col + 16 * i) * LD + d], LD);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int j = 0; j < 2; ++j) mma_sync(sums[i][j], a[i], b[j], sums[i][j]);
        }
      }
    }
    __device__ void write(float* out) const {
      int const row = threadIdx.x / 32 / 2 * 32;
      int const col = threadIdx.x / 32 % 2 * 32;
      for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 2; ++j) {
          nvcuda::wmma::store_matrix_sync(&out[(row + 16 * i) * SUM_LD + col + 16 * j], sums[i][j],
                                          SUM_LD, nvcuda::wmma::mem_row_major);
        }
      }
    }
  };

  // Each thread 8 rows x 4 columns: rows y + 8 i, columns x + 16 j.
  struct FmaSums {
    float sums[8][4];

    __device__ void clear() {
      for (auto& row : sums) {
        for (auto& sum : row) sum = 0.0f;
      }
    }
    __device__ void multiply(Operands const& operands) {
      int const x = threadIdx.x % 16;
      int const y = threadIdx.x / 16;
#pragma unroll 4
      for (int d = 0; d < DEPTH; ++d) {
        float a[8];
        float b[4];
#pragma unroll
        for (int i = 0; i < 8; ++i) a[i] = operands.a[(y + 8 * i) * LD + d];
#pragma unroll
        for (int j = 0; j < 4; ++j) b[j] = operands.b[(x + 16 * j) * LD + d];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(a[i], b[j], sums[i][j]);
        }
      }
    }
    __device__ void write(float* out) const {
      int const x = threadIdx.x % 16;
      int const y = threadIdx.x / 16;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[(y + 8 * i) * SUM_LD + x + 16 * j] = sums[i][j];
      }
    }
  };

  using Sums = std::conditional_t<kTensorCores, TensorCoreSums, FmaSums>;
};

}  // namespace m3::kernels
