#include "kernels/sm90_moe_gemm.cuh"

namespace m3::kernels {
namespace {

// outputs[row of place] = proj * activations[place], fp32.
struct ProjProduct {
  static constexpr bool kGather = false;

  __device__ static int first_row(MoeGemmArgs const&, int weight_tile, int half) {
    return weight_tile * SM90_MOE_WEIGHT_ROWS + half * SM90_MOE_WEIGHT_ROWS / 2;
  }

  template <int N>
  __device__ static void finish(MoeGemmArgs const& g, MoeTokens const& t, int group,
                                float (&sums)[2][N / 2]) {
    int const lane = threadIdx.x % 32;
    int const warp = threadIdx.x / 32 % 4;
    int const first = t.weight_tile * SM90_MOE_WEIGHT_ROWS + group * 64;
    float* out = g.outputs + first + warp * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
#pragma unroll
      for (int token = 0; token < 2; ++token) {
        int const i = 8 * j + lane % 4 * 2 + token;
        if (i >= t.rows) continue;
        float* target = out + int64_t{g.rows[t.place + i]} * g.weight_rows;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (first + half * SM90_MOE_WEIGHT_ROWS / 2 >= g.weight_rows) continue;
          // Eight lanes write 32 bytes of one row
          __stcs(target + half * SM90_MOE_WEIGHT_ROWS / 2, sums[half][4 * j + token]);
          __stcs(target + half * SM90_MOE_WEIGHT_ROWS / 2 + 8, sums[half][4 * j + token + 2]);
        }
      }
    }
  }
};

}  // namespace

cudaError_t launch_sm90_moe_proj(MoeParams const& p, Sm90MoeWorkspace const& ws,
                                 cudaStream_t stream) {
  MoeGemmArgs g{};
  g.in = ws.activations;
  g.depth = static_cast<int>(p.width);
  g.weight_rows = static_cast<int>(p.hidden);
  g.weight_tiles = static_cast<int>(ceil_div(p.hidden, SM90_MOE_WEIGHT_ROWS));
  g.arrivals = ws.arrivals + SM90_MOE_MAX_CTAS;
  return launch_sm90_moe_gemm<ProjProduct>(p, p.proj, p.shared_proj, g, ws, stream);
}

}  // namespace m3::kernels
