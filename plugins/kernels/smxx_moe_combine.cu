#include "kernels/numeric.cuh"
#include "kernels/smxx_moe_stages.h"

namespace m3::kernels {
namespace {

constexpr int THREADS = 256;

// y = sum over slots in order of weight * expert output, + shared expert; fp32, rounded once.
template <class T>
__global__ void __launch_bounds__(THREADS) moe_combine(MoeParams p, MoeWorkspace ws) {
  int64_t const token = blockIdx.x;
  bool const real = p.first_token + token < *p.real_tokens;
  T* y = static_cast<T*>(p.y) + token * p.hidden;
  for (int64_t h = threadIdx.x; h < p.hidden; h += THREADS) {
    float sum = 0.0f;
    if (real) {  // the outputs of padding tokens were never written
      for (int k = 0; k < p.top_k; ++k) {
        int64_t const pair = token * p.top_k + k;
        sum = fmaf(ws.expert_weights[pair], ws.pair_outputs[pair * p.hidden + h], sum);
      }
      sum += ws.shared_outputs[token * p.hidden + h];
    }
    y[h] = from_float<T>(sum);
  }
}

}  // namespace

cudaError_t launch_moe_combine(MoeParams const& p, MoeWorkspace const& ws, cudaStream_t stream) {
  auto const blocks = static_cast<unsigned>(p.tokens);
  if (p.type == Type::kFloat32) {
    moe_combine<float><<<blocks, THREADS, 0, stream>>>(p, ws);
  } else {
    moe_combine<__nv_bfloat16><<<blocks, THREADS, 0, stream>>>(p, ws);
  }
  return cudaGetLastError();
}

}  // namespace m3::kernels
