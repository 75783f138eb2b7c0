#include "kernels/numeric.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/sm90_moe_math.cuh"
#include "kernels/sm90_moe_stages.h"
#include "kernels/sm90_ptx.cuh"

namespace m3::kernels {
namespace {

constexpr int THREADS = 256;
constexpr int BATCH = 5;  // rows whose loads are in flight together

// y = sum over slots in order of weight * expert output, + shared expert; fp32, rounded once.
__global__ void __launch_bounds__(THREADS) sm90_moe_combine(MoeParams p, Sm90MoeWorkspace ws) {
  wait_for_previous_kernel();
  int64_t const token = blockIdx.x;
  int64_t const h = (int64_t{blockIdx.y} * THREADS + threadIdx.x) * 4;
  if (h >= p.hidden) return;
  float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
  if (p.first_token + token < *p.real_tokens) {  // padding tokens have no places
    int32_t const* places = ws.places + token * (p.top_k + 1);
    float const* weights = ws.expert_weights + token * p.top_k;
    for (int first = 0; first <= p.top_k; first += BATCH) {
      MoeFour values[BATCH];
      float weight[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        int const k = min(first + i, p.top_k);
        values[i] = MoeFour::load(ws.outputs + (places[k] * p.hidden + h) / 4);
        weight[i] = k < p.top_k ? weights[k] : 1.0f;
      }
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        if (first + i > p.top_k) break;
        values[i].add_to(sum, weight[i]);
      }
    }
  }
  __nv_bfloat162 const low = __floats2bfloat162_rn(sum.x, sum.y);
  __nv_bfloat162 const high = __floats2bfloat162_rn(sum.z, sum.w);
  auto* y =
      reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p.y) + token * p.hidden + h);
  y[0] = low;
  y[1] = high;
}

}  // namespace

cudaError_t launch_sm90_moe_combine(MoeParams const& p, Sm90MoeWorkspace const& ws,
                                    cudaStream_t stream) {
  dim3 const grid(static_cast<unsigned>(p.tokens),
                  static_cast<unsigned>(ceil_div(p.hidden, 4 * THREADS)));
  return launch_behind(sm90_moe_combine, grid, THREADS, 0, stream, p, ws);
}

}  // namespace m3::kernels
