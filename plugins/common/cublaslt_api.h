#pragma once

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>

// The part of cuBLASLt's C interface that this library calls, declared here because the toolchain
// from PyPI has no cublasLt.h (its wheel weighs 400 MB). Values are those of cublasLt.h of CUDA 12
// and 13, which the ABI of libcublasLt.so.12 and .13 fixes.
namespace m3::cublaslt {

using Status = int;
using Handle = void*;
using MatmulDesc = void*;
using MatrixLayout = void*;
using Preference = void*;

struct Algo {
  uint64_t data[8];
};

struct HeuristicResult {
  Algo algo;
  size_t workspace_size;
  Status state;
  float waves_count;
  int reserved[4];
};

constexpr Status kSuccess = 0;
constexpr int kCompute32F = 68;  // CUBLAS_COMPUTE_32F: no TF32
constexpr int32_t kTranspose = 1;
constexpr int kDescTransA = 3;
constexpr int kDescEpilogue = 7;
constexpr int kDescBiasPointer = 8;
constexpr uint32_t kEpilogueBias = 4;
constexpr int kPreferMaxWorkspace = 1;
constexpr int kPreferReductionSchemes = 3;
constexpr int kPreferAlignmentA = 5;  // B, C and D follow
constexpr uint32_t kReduceInComputeType = 2;

struct Api {
  Status (*create)(Handle*);
  Status (*desc_create)(MatmulDesc*, int compute_type, cudaDataType scale_type);
  Status (*desc_destroy)(MatmulDesc);
  Status (*desc_set)(MatmulDesc, int attribute, void const* value, size_t bytes);
  Status (*layout_create)(MatrixLayout*, cudaDataType, uint64_t rows, uint64_t cols, int64_t ld);
  Status (*layout_destroy)(MatrixLayout);
  Status (*preference_create)(Preference*);
  Status (*preference_destroy)(Preference);
  Status (*preference_set)(Preference, int attribute, void const* value, size_t bytes);
  Status (*heuristic)(Handle, MatmulDesc, MatrixLayout a, MatrixLayout b, MatrixLayout c,
                      MatrixLayout d, Preference, int requested, HeuristicResult*, int* returned);
  Status (*matmul)(Handle, MatmulDesc, void const* alpha, void const* a, MatrixLayout,
                   void const* b, MatrixLayout, void const* beta, void const* c, MatrixLayout,
                   void* d, MatrixLayout, Algo const*, void* workspace, size_t workspace_bytes,
                   cudaStream_t);
};

}  // namespace m3::cublaslt
