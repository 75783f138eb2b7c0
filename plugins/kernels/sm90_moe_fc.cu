#include "kernels/sm90_moe_gemm.cuh"
#include "kernels/sm90_moe_math.cuh"

namespace m3::kernels {
namespace {

// activations[place] = swiglu(fc * x[token of place]). A warpgroup has 64 gate rows and the 64 up
// rows that go with them, so a thread holds both sums of a value.
struct FcProduct {
  static constexpr bool kGather = true;

  template <int ROWS>
  __device__ static int first_row(MoeGemmArgs const& g, int weight_tile, int half) {
    return weight_tile * ROWS / 2 + half * g.weight_rows / 2;
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
    __nv_bfloat16* out =
        g.activations + int64_t{t.place + lane / 4} * width + first + warp * 16 + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      uint32_t values[2];  // weight rows lane / 4 and + 8, of two tokens each
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const at = 4 * j + 2 * i;
        __nv_bfloat162 const pair = __floats2bfloat162_rn(
            swiglu(g, sums[0][at], sums[1][at]), swiglu(g, sums[0][at + 1], sums[1][at + 1]));
        values[i] = ptx::transpose_8x8(reinterpret_cast<uint32_t const&>(pair));
      }
      if (8 * j + lane / 4 < t.rows) {
        auto* target = reinterpret_cast<uint32_t*>(out + int64_t{8 * j} * width);
        target[0] = values[0];
        target[4] = values[1];
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
