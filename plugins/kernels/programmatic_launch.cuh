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

// Every block of `kernel` must call wait_for_previous_kernel. `cluster` blocks run as a cluster;
// above 1 only for code and GPUs from sm_90 on.
template <class... Formal, class... Actual>
cudaError_t launch_clusters_behind(void (*kernel)(Formal...), int cluster, dim3 grid, dim3 block,
                                   size_t shared_bytes, cudaStream_t stream,
                                   Actual const&... arguments) {
  cudaFuncAttributes compiled;
  cudaError_t const status =
      cudaFuncGetAttributes(&compiled, reinterpret_cast<void const*>(kernel));
  if (status != cudaSuccess) return status;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  // Code of an older PTX version lacks the wait, so it must not start early on any GPU.
  config.numAttrs = compiled.ptxVersion < 90 ? 0 : cluster > 1 ? 2 : 1;

  return cudaLaunchKernelEx(&config, kernel, static_cast<Formal>(arguments)...);
}

template <class... Formal, class... Actual>
cudaError_t launch_behind(void (*kernel)(Formal...), dim3 grid, dim3 block, size_t shared_bytes,
                          cudaStream_t stream, Actual const&... arguments) {
  return launch_clusters_behind(kernel, 1, grid, block, shared_bytes, stream, arguments...);
}

}  // namespace m3::kernels
