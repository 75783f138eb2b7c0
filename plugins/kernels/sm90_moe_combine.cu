#include "kernels/numeric.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/sm90_moe_math.cuh"
#include "kernels/sm90_moe_stages.h"
#include "kernels/sm90_ptx.cuh"

namespace m3::kernels {
namespace {

constexpr int THREADS = 256;
constexpr int BATCH = 5;  // rows whose loads are in flight together
constexpr int EACH = 8;   // neighbours of one thread

// y = sum over slots in order of weight * expert output, + shared expert; fp32, rounded once.
__global__ void __launch_bounds__(THREADS, 4) sm90_moe_combine(MoeParams p, Sm90MoeWorkspace ws) {
  int64_t const token = blockIdx.x;
  int64_t const h = (int64_t{blockIdx.y} * THREADS + threadIdx.x) * EACH;
  int32_t const* places = ws.places + token * (p.top_k + 1);
  float const* weights = ws.expert_weights + token * p.top_k;
  int const real_tokens = *p.real_tokens;  // older than the previous kernel
  wait_for_previous_kernel();
  if (h >= p.hidden) return;
  float4 sums[2] = {};
  for (int first = 0; first <= p.top_k; first += BATCH) {
    int place[BATCH];
    float weight[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      int const k = min(first + i, p.top_k);
      place[i] = __ldcg(places + k);
      weight[i] = k < p.top_k ? __ldcg(weights + k) : 1.0f;
    }
    if (p.first_token + token >= real_tokens) break;  // padding tokens have no places
    MoeFour values[BATCH][2];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      MoeFour::load(values[i], ws.outputs + (place[i] * p.hidden + h) / 4);
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      if (first + i > p.top_k) break;
      values[i][0].add_to(sums[0], weight[i]);
      values[i][1].add_to(sums[1], weight[i]);
    }
  }
  __nv_bfloat162 const y[] = {
      __floats2bfloat162_rn(sums[0].x, sums[0].y), __floats2bfloat162_rn(sums[0].z, sums[0].w),
      __floats2bfloat162_rn(sums[1].x, sums[1].y), __floats2bfloat162_rn(sums[1].z, sums[1].w)};
  auto* to = static_cast<__nv_bfloat16*>(p.y) + token * p.hidden + h;
  *reinterpret_cast<uint4*>(to) = reinterpret_cast<uint4 const&>(y);
}

}  // namespace

cudaError_t launch_sm90_moe_combine(MoeParams const& p, Sm90MoeWorkspace const& ws,
                                    cudaStream_t stream) {
  dim3 const grid(static_cast<unsigned>(p.tokens),
                  static_cast<unsigned>(ceil_div(p.hidden, EACH * THREADS)));
  return launch_behind(sm90_moe_combine, grid, THREADS, 0, stream, p, ws);
}

}  // namespace m3::kernels
