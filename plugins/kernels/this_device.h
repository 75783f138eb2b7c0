#pragma once

#include <cuda_runtime_api.h>

// What launchers ask of the GPU that the calling thread uses.
namespace m3::kernels {

inline cudaError_t read_attribute(int& value, cudaDeviceAttr which) {
  int device = 0;
  cudaError_t const status = cudaGetDevice(&device);
  return status == cudaSuccess ? cudaDeviceGetAttribute(&value, which, device) : status;
}

inline cudaError_t count_processors(int& processors) {
  return read_attribute(processors, cudaDevAttrMultiProcessorCount);
}

// Compute capability 9.0 and no other: later GPUs have no wgmma.
inline bool is_sm90() {
  int major = 0, minor = 0;
  return read_attribute(major, cudaDevAttrComputeCapabilityMajor) == cudaSuccess &&
         read_attribute(minor, cudaDevAttrComputeCapabilityMinor) == cudaSuccess && major == 9 &&
         minor == 0;
}

// The version that the kernel's code for this GPU was compiled for, as 90; 0 when there is none.
template <class... Formal>
int compiled_version(void (*kernel)(Formal...)) {
  cudaFuncAttributes compiled{};
  auto const status = cudaFuncGetAttributes(&compiled, reinterpret_cast<void const*>(kernel));
  return status == cudaSuccess ? compiled.ptxVersion : 0;
}

// Whether this GPU runs a kernel that is empty unless compiled for sm_90a.
template <class... Formal>
bool runs_sm90(void (*kernel)(Formal...)) {
  return is_sm90() && compiled_version(kernel) == 90;
}

}  // namespace m3::kernels
