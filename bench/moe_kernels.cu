// The mixture of experts behind C functions, for bench/moe_library.py: no TensorRT in between. With
// M3_SM90 the kernels for compute capability 9.0, else the portable ones.
#include "kernels/sm90_moe.h"
#ifdef M3_SM90
#include "kernels/sm90_moe_plan.h"
#endif

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

// Whether the experts' products are launches of their own.
int m3_bench_moe_has_products(MoeParams const* p) {
  return !sm90_moe_decode_takes(*p);
}

// The experts' two products again, after m3_bench_moe with the same workspace: its plan, sums that
// nobody combines.
int m3_bench_moe_products(MoeParams const* p, void* workspace, cudaStream_t stream) {
  Sm90MoeWorkspace ws{};
  sm90_moe_carve(*p, workspace, ws);
  size_t const bytes = SM90_MOE_COUNTERS * sizeof(*ws.arrivals);
  cudaError_t status = cudaMemsetAsync(ws.arrivals, 0, bytes, stream);
  if (status == cudaSuccess) status = launch_sm90_moe_fc(*p, ws, stream);
  return status == cudaSuccess ? launch_sm90_moe_proj(*p, ws, stream) : status;
}

#else

int64_t m3_bench_moe_workspace(MoeParams const* p) {
  return static_cast<int64_t>(moe_workspace_bytes(*p));
}

int m3_bench_moe(MoeParams const* p, void* workspace, cudaStream_t stream) {
  return launch_moe(*p, workspace, stream);
}

int m3_bench_moe_has_products(MoeParams const*) {
  return false;
}

int m3_bench_moe_products(MoeParams const*, void*, cudaStream_t) {
  return cudaErrorNotSupported;
}

#endif
}
