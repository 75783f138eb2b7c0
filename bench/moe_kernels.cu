// The mixture of experts behind C functions, for bench/moe_library.py: no TensorRT in between. With
// M3_SM90 the kernels for compute capability 9.0, else the portable ones.
#include "kernels/sm90_moe.h"

using namespace m3::kernels;

extern "C" {

int64_t m3_bench_params_bytes() {
  return sizeof(MoeParams);
}

#ifdef M3_SM90

int64_t m3_bench_moe_workspace(MoeParams const* p) {
  return static_cast<int64_t>(sm90_moe_workspace_bytes(*p));
}

int m3_bench_moe(MoeParams const* p, void* workspace, cudaStream_t stream) {
  return launch_sm90_moe(*p, workspace, stream);
}

#else

int64_t m3_bench_moe_workspace(MoeParams const* p) {
  return static_cast<int64_t>(moe_workspace_bytes(*p));
}

int m3_bench_moe(MoeParams const* p, void* workspace, cudaStream_t stream) {
  return launch_moe(*p, workspace, stream);
}

#endif
}
