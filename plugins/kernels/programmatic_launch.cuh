#pragma once

#include <cuda_runtime_api.h>

// Programmatic dependent launch: the next kernel's blocks take their places while the previous one
// still runs, and wait there for its results. On GPUs or in code without it, an ordinary launch.
namespace m3::kernels {

__device__ inline void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n");
#endif
}

// First statement of a kernel launched by launch_behind: all writes of the previous one are
// visible.
__device__ inline void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

// Every block of `kernel` must call wait_for_previous_kernel.
template <class... Formal, class... Actual>
cudaError_t launch_behind(void (*kernel)(Formal...), dim3 grid, dim3 block, size_t shared_bytes,
                          cudaStream_t stream, Actual const&... arguments) {
  cudaFuncAttributes compiled;
  cudaError_t const status =
      cudaFuncGetAttributes(&compiled, reinterpret_cast<void const*>(kernel));
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  // Code of an older PTX version lacks the wait, so it must not start early on any GPU.
  config.numAttrs = compiled.ptxVersion >= 90 ? 1 : 0;

  return cudaLaunchKernelEx(&config, kernel, static_cast<Formal>(arguments)...);
}

}  // namespace m3::kernels
