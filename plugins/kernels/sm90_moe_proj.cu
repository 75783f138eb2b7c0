#include "kernels/sm90_moe_runs.cuh"

namespace m3::kernels {
namespace {

// outputs[place] = proj * activations[place].
struct ProjProduct {
  static constexpr bool kGather = false;
  static constexpr int kNeighbours = 4;

  // Of one half of a tile: the first neighbour and the first group.
  template <int ROWS>
  __device__ static int2 rows(MoeGemmArgs const&, int expert_row, int weight_tile, int half) {
    return {2 * half, (expert_row + weight_tile * ROWS) / 32};
  }

  // A lane has four neighbours of two tokens, a warp whole lines.
  template <int N, int ROWS>
  __device__ static void finish(MoeGemmArgs const& g, MoeTokens const& t, int part,
                                float (&sums)[2][N / 2]) {
    int const lane = threadIdx.x % 32;
    int const warp = threadIdx.x / 32 % 4;
    int const first = t.weight_tile * ROWS + part * 128 + warp * 32;
    if (first >= g.weight_rows) return;
    int const token = lane % 4 * 2;
    int const left = t.rows - token;
    int64_t const fours = g.weight_rows / 4;  // of a row
    MoeFour* out = g.outputs + (t.place + token) * fours + first / 4 + lane / 4;
#pragma unroll
    for (int j = 0; j < N / 8; ++j, out += 8 * fours) {
      asm volatile("" : "+l"(out));  // or each address is computed from the beginning
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float const* low = &sums[0][4 * j + i];
        float const* high = &sums[1][4 * j + i];
        MoeFour::pack(make_float4(low[0], low[2], high[0], high[2]))
            .store_below(8 * j + i, left, out + i * fours);
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
  g.arrivals = ws.arrivals + SM90_MOE_MAX_CTAS;
  int64_t const average = p.tokens * p.top_k / p.experts;
  auto* launch = launch_sm90_moe_gemm<ProjProduct>;
  if (average > SM90_MOE_SHORT_TOKENS && sm90_moe_run_stages(p.width) >= SM90_MOE_RUN_MIN_STAGES) {
    launch = average <= SM90_MOE_MAX_TOKENS ? launch_sm90_moe_runs<ProjProduct, 1>
                                            : launch_sm90_moe_runs<ProjProduct, 2>;
  }
  return launch(p, p.proj, p.shared_proj, g, ws, stream);
}

}  // namespace m3::kernels
