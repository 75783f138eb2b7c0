#include "kernels/sm90_moe_gemm.cuh"

namespace m3::kernels {
namespace {

// outputs[place] = proj * activations[place], fp32.
struct ProjProduct {
  static constexpr bool kGather = false;

  template <int ROWS>
  __device__ static int first_row(MoeGemmArgs const&, int weight_tile, int half) {
    return weight_tile * ROWS + half * ROWS / 2;
  }

  // v: two tokens (lane % 4 counts pairs) of two weight rows (lane / 4 and + 8). Returned: four
  // neighbouring rows of one token, so that a lane writes 16 bytes.
  __device__ static float4 gather_rows(float const (&v)[4]) {
    bool const odd = threadIdx.x & 4;
    float a[4] = {v[0], v[1], v[2], v[3]};
    float const x = __shfl_xor_sync(~0u, odd ? a[0] : a[1], 4);
    float const y = __shfl_xor_sync(~0u, odd ? a[2] : a[3], 4);
    (odd ? a[0] : a[1]) = x;
    (odd ? a[2] : a[3]) = y;
    bool const high = threadIdx.x & 8;
    float const z = __shfl_xor_sync(~0u, high ? a[0] : a[2], 8);
    float const w = __shfl_xor_sync(~0u, high ? a[1] : a[3], 8);
    return high ? make_float4(z, w, a[2], a[3]) : make_float4(a[0], a[1], z, w);
  }

  template <int N, int ROWS>
  __device__ static void finish(MoeGemmArgs const& g, MoeTokens const& t, int part,
                                float (&sums)[2][N / 2]) {
    int const lane = threadIdx.x % 32;
    int const warp = threadIdx.x / 32 % 4;
    int const first = t.weight_tile * ROWS + part * 64;
    int const token = lane % 4 * 2 + lane / 4 % 2;
    float* out = g.outputs + int64_t{t.place + token} * g.weight_rows + first + warp * 16 +
                 (lane & 8) + lane / 16 * 4;
    bool const has[2] = {first < g.weight_rows, first + ROWS / 2 < g.weight_rows};
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      float* target = out + int64_t{8 * j} * g.weight_rows;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float const* v = &sums[half][4 * j];
        float4 const value = gather_rows({v[0], v[1], v[2], v[3]});
        if (8 * j + token < t.rows && has[half]) {
          __stcs(reinterpret_cast<float4*>(target + half * ROWS / 2), value);
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
  g.arrivals = ws.arrivals + SM90_MOE_MAX_CTAS;
  return launch_sm90_moe_gemm<ProjProduct>(p, p.proj, p.shared_proj, g, ws, stream);
}

}  // namespace m3::kernels
