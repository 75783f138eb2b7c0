#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/packed_tokens.h"

namespace m3::kernels {

// Describes a tensor of up to 4 `dims`, the innermost first and without gaps, to TMA: boxes with a
// 128-byte swizzle (box[0] is 128 bytes), zeros outside. `strides`: bytes, of all dims but the
// innermost. The driver's encoder is found at the first call.
inline cudaError_t encode_tensor_map(
    CUtensorMap& map, void const* data, CUtensorMapDataType type, int rank, cuuint64_t const* dims,
    cuuint64_t const* strides, cuuint32_t const* box,
    CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  static PFN_cuTensorMapEncodeTiled_v12000 const encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    cudaError_t const status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                                12000, cudaEnableDefault, &result);
    bool const found = status == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found ? function : nullptr);
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  cuuint32_t const steps[] = {1, 1, 1, 1};
  CUresult const status =
      encode(&map, type, static_cast<cuuint32_t>(rank), const_cast<void*>(data), dims, strides, box,
             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// A contiguous bf16 tensor.
inline cudaError_t encode_tensor_map(CUtensorMap& map, void const* data, int rank,
                                     cuuint64_t const* dims, cuuint32_t const* box) {
  cuuint64_t strides[3];
  cuuint64_t stride = 2;
  for (int i = 0; i + 1 < rank; ++i) strides[i] = stride *= dims[i];
  return encode_tensor_map(map, data, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, dims, strides, box);
}

// A bf16 pool [P, 2, B, Hkv, D]: a box is half the channels of a KV head's keys, or values, of a
// page.
inline cudaError_t encode_kv_map(CUtensorMap& map, void const* kv_cache, int32_t num_kv_heads,
                                 int32_t num_pages) {
  cuuint64_t const dims[] = {kHeadSize, static_cast<cuuint64_t>(num_kv_heads), kBlockSize,
                             2 * static_cast<cuuint64_t>(num_pages)};
  cuuint32_t const box[] = {64, 1, kBlockSize, 1};
  return encode_tensor_map(map, kv_cache, 4, dims, box);
}

}  // namespace m3::kernels
