#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace m3::kernels {

// Describes a bf16 matrix [rows, columns] to TMA: boxes of box_rows x 64 columns, 128-byte swizzle,
// zeros outside. The driver's encoder is found at the first call.
inline cudaError_t encode_tensor_map(CUtensorMap& map, void const* data, int64_t rows,
                                     int64_t columns, int box_rows) {
  static PFN_cuTensorMapEncodeTiled_v12000 const encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    cudaError_t const status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                                12000, cudaEnableDefault, &result);
    bool const found = status == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found ? function : nullptr);
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  cuuint64_t const sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  cuuint64_t const strides[] = {static_cast<cuuint64_t>(columns) * 2};
  cuuint32_t const box[] = {64, static_cast<cuuint32_t>(box_rows)};
  cuuint32_t const steps[] = {1, 1};
  CUresult const status =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), sizes, strides,
             box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace m3::kernels
