// The mixture of experts behind C functions, for bench/moe_library.py: no TensorRT in between.
#include "kernels/sm90_moe.h"

using namespace m3::kernels;

extern "C" {

int64_t m3_bench_params_bytes() {
  return sizeof(MoeParams);
}

int64_t m3_bench_moe_workspace(MoeParams const* p, int sm90) {
  return static_cast<int64_t>(sm90 ? sm90_moe_workspace_bytes(*p) : moe_workspace_bytes(*p));
}

int m3_bench_moe(MoeParams const* p, void* workspace, cudaStream_t stream, int sm90) {
  return sm90 ? launch_sm90_moe(*p, workspace, stream) : launch_moe(*p, workspace, stream);
}
}
