#include <algorithm>

#include "kernels/numeric.cuh"
#include "kernels/smxx_gemm_epilogue.h"

namespace m3::kernels {
namespace {

constexpr int THREADS = 256;

// No __restrict__ on sums and out: they may be one array.
template <class Bias, class Out>
__global__ void gemm_epilogue(float const* sums, Bias const* __restrict__ bias, Out* out,
                              int64_t count, int64_t cols, bool gelu_erf) {
  int64_t const step = int64_t{gridDim.x} * THREADS;
  for (int64_t i = int64_t{blockIdx.x} * THREADS + threadIdx.x; i < count; i += step) {
    float x = sums[i];
    if (bias != nullptr) x += to_float(bias[i % cols]);
    if (gelu_erf) x = 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    out[i] = from_float<Out>(x);
  }
}

template <class Bias, class Out>
cudaError_t launch(GemmEpilogueParams const& p, cudaStream_t stream) {
  int64_t const count = p.rows * p.cols;
  auto const blocks = static_cast<unsigned>(std::min<int64_t>(ceil_div(count, THREADS), 1 << 16));
  gemm_epilogue<<<blocks, THREADS, 0, stream>>>(p.sums, static_cast<Bias const*>(p.bias),
                                                static_cast<Out*>(p.out), count, p.cols,
                                                p.gelu_erf);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_gemm_epilogue(GemmEpilogueParams const& p, cudaStream_t stream) {
  if (p.rows == 0 || p.cols == 0) return cudaSuccess;
  bool const float_bias = p.bias_type == Type::kFloat32;
  if (p.out_type == Type::kFloat32) {
    return float_bias ? launch<float, float>(p, stream) : launch<__nv_bfloat16, float>(p, stream);
  }
  if (p.out_type == Type::kBfloat16 && !float_bias) {
    return launch<__nv_bfloat16, __nv_bfloat16>(p, stream);
  }
  return cudaErrorInvalidValue;  // a float32 bias with a bf16 output
}

}  // namespace m3::kernels
