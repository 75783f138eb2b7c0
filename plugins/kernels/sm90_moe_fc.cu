#include "kernels/sm90_moe_gemm.cuh"
#include "kernels/sm90_moe_math.cuh"

namespace m3::kernels {
namespace {

// activations[place] = swiglu(fc * x[token of place]). A warpgroup has 64 gate rows and the 64 up
// rows that go with them, so a thread holds both sums of a value.
struct FcProduct {
  static constexpr bool kGather = true;

  static constexpr int kNeighbours = 2;

  // Of one half of a tile, gate or up rows: the first neighbour and the first group.
  template <int ROWS>
  __device__ static int2 rows(MoeGemmArgs const& g, int expert_row, int weight_tile, int half) {
    return {0, (expert_row + weight_tile * ROWS / 2 + half * g.weight_rows / 2) / 16};
  }

  __device__ static float swiglu(MoeGemmArgs const& g, float gate, float up) {
    return clamped_swiglu(gate, up, g.alpha, g.limit);
  }

  template <int N, int ROWS>
  __device__ static void finish(MoeGemmArgs const& g, MoeTokens const& t, int part,
                                float (&sums)[2][N / 2]) {
    int const width = g.weight_rows / 2;
    int const lane = threadIdx.x % 32;
    int const warp = threadIdx.x / 32 % 4;
    int const first = t.weight_tile * ROWS / 2 + part * 64;
    if (first >= width) return;
    int const token = lane % 4 * 2;
    __nv_bfloat16* out =
        g.activations + int64_t{t.place + token} * width + first + warp * 16 + lane / 4 * 2;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float const* gate = &sums[0][4 * j + i];
        float const* up = &sums[1][4 * j + i];
        if (8 * j + token + i < t.rows) {
          *reinterpret_cast<__nv_bfloat162*>(out + int64_t{8 * j + i} * width) =
              __floats2bfloat162_rn(swiglu(g, gate[0], up[0]), swiglu(g, gate[2], up[2]));
        }
      }
    }
  }
};

}  // namespace

cudaError_t launch_sm90_moe_fc(MoeParams const& p, Sm90MoeWorkspace const& ws,
                               cudaStream_t stream) {
  MoeGemmArgs g{};
  g.in = static_cast<__nv_bfloat16 const*>(p.x);
  g.depth = static_cast<int>(p.hidden);
  g.weight_rows = static_cast<int>(2 * p.width);
  g.arrivals = ws.arrivals;
  return launch_sm90_moe_gemm<FcProduct>(p, p.fc, p.shared_fc, g, ws, stream);
}

}  // namespace m3::kernels
