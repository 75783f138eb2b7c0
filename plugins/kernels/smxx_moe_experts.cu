#include "kernels/gemm_tile.cuh"
#include "kernels/smxx_moe_stages.h"

namespace m3::kernels {
namespace {

// A grouped GEMM over the tiles of the work list, or, without one, over all real tokens with one
// weight (the shared expert).
template <class T>
struct ExpertGemm {
  T const* in;                       // [rows, depth]
  T const* weight[kMaxExpertParts];  // [experts_per_part, weight_rows, depth]
  int32_t experts_per_part;
  int64_t depth, weight_rows;
  MoeTile const* tiles;         // nullptr: blockIdx.y counts tiles of the real tokens
  int32_t const* sorted_pairs;  // nullptr: row = place
  int32_t top_k;                // sorted_pairs[place] / top_k is the token
  int32_t const* real_tokens;
  int64_t first_token, tokens;
  float alpha, limit;
  bool vector;  // all rows 16-byte aligned
};

template <class T>
__device__ MoeTile find_tile(ExpertGemm<T> const& g) {
  if (g.tiles != nullptr) return g.tiles[blockIdx.y];
  int64_t const real = min(g.tokens, *g.real_tokens - g.first_token);
  int64_t const first = int64_t{blockIdx.y} * MOE_TILE_ROWS;
  int64_t const end = min(first + MOE_TILE_ROWS, real);
  return {first < end ? 0 : -1, static_cast<int32_t>(first), static_cast<int32_t>(end)};
}

template <class T>
__device__ T const* expert_weight(ExpertGemm<T> const& g, int32_t expert) {
  T const* part = g.weight[expert / g.experts_per_part];
  return part + expert % g.experts_per_part * g.weight_rows * g.depth;
}

// activations[place] = swiglu(fc * x[token of place]). A tile takes 32 gate rows of the weight and
// the 32 up rows that go with them.
template <class T>
__global__ void __launch_bounds__(GemmTile<T>::THREADS)
    moe_fc(ExpertGemm<T> g, T* __restrict__ activations) {
  constexpr int HALF = GemmTile<T>::COLS / 2;
  __shared__ typename GemmTile<T>::Shared shared;
  MoeTile const tile = find_tile(g);
  if (tile.expert < 0) return;
  T const* weight = expert_weight(g, tile.expert);
  int64_t const width = g.weight_rows / 2;
  int64_t const column = int64_t{blockIdx.x} * HALF;
  GemmTile<T>::run(
      shared, g.depth, g.vector,
      [&](int row) -> T const* {
        int const place = tile.first + row;
        if (place >= tile.end) return nullptr;
        int64_t const token = g.sorted_pairs == nullptr ? place : g.sorted_pairs[place] / g.top_k;
        return g.in + token * g.depth;
      },
      [&](int col) -> T const* {
        int64_t const c = column + col % HALF;
        return c < width ? weight + (c + (col < HALF ? 0 : width)) * g.depth : nullptr;
      });
  for (int i = threadIdx.x; i < MOE_TILE_ROWS * HALF; i += GemmTile<T>::THREADS) {
    int const row = i / HALF;
    int const col = i % HALF;
    if (tile.first + row >= tile.end || column + col >= width) continue;
    float const* sums = &shared.sums[row * GemmTile<T>::SUM_LD];
    float const gate = fminf(sums[col], g.limit);
    float const up = fminf(fmaxf(sums[HALF + col], -g.limit), g.limit);
    float const value = gate / (1.0f + expf(-g.alpha * gate)) * (up + 1.0f);
    activations[(tile.first + row) * width + column + col] = from_float<T>(value);
  }
}

// outputs[pair of place] = proj * activations[place], fp32.
template <class T>
__global__ void __launch_bounds__(GemmTile<T>::THREADS)
    moe_proj(ExpertGemm<T> g, float* __restrict__ outputs) {
  constexpr int COLS = GemmTile<T>::COLS;
  __shared__ typename GemmTile<T>::Shared shared;
  MoeTile const tile = find_tile(g);
  if (tile.expert < 0) return;
  T const* weight = expert_weight(g, tile.expert);
  int64_t const column = int64_t{blockIdx.x} * COLS;
  GemmTile<T>::run(
      shared, g.depth, g.vector,
      [&](int row) -> T const* {
        int64_t const place = tile.first + row;
        return place < tile.end ? g.in + place * g.depth : nullptr;
      },
      [&](int col) -> T const* {
        int64_t const c = column + col;
        return c < g.weight_rows ? weight + c * g.depth : nullptr;
      });
  for (int i = threadIdx.x; i < MOE_TILE_ROWS * COLS; i += GemmTile<T>::THREADS) {
    int const place = tile.first + i / COLS;
    int64_t const c = column + i % COLS;
    if (place >= tile.end || c >= g.weight_rows) continue;
    int64_t const pair = g.sorted_pairs == nullptr ? place : g.sorted_pairs[place];
    outputs[pair * g.weight_rows + c] = shared.sums[i / COLS * GemmTile<T>::SUM_LD + i % COLS];
  }
}

bool aligned(void const* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

template <class T>
ExpertGemm<T> describe(MoeParams const& p, void const* in, void const* const* weight, int parts,
                       int64_t depth, int64_t weight_rows) {
  ExpertGemm<T> g{};
  g.in = static_cast<T const*>(in);
  g.experts_per_part = 1;
  g.depth = depth;
  g.weight_rows = weight_rows;
  g.top_k = p.top_k;
  g.real_tokens = p.real_tokens;
  g.first_token = p.first_token;
  g.tokens = p.tokens;
  g.alpha = p.swiglu_alpha;
  g.limit = p.swiglu_limit;
  g.vector = depth * int64_t{sizeof(T)} % 16 == 0 && aligned(in);
  for (int i = 0; i < parts; ++i) {
    g.weight[i] = static_cast<T const*>(weight[i]);
    g.vector = g.vector && aligned(weight[i]);
  }
  return g;
}

// fc, then proj. `routed`: over the work list of all experts; else the shared expert.
template <class T>
cudaError_t launch(MoeParams const& p, MoeWorkspace const& ws, bool routed, cudaStream_t stream) {
  int64_t const width = routed ? p.width : p.shared_width;
  int const parts = routed ? p.parts : 1;
  void* activations = routed ? ws.activations : ws.shared_activations;
  auto fc = describe<T>(p, p.x, routed ? p.fc : &p.shared_fc, parts, p.hidden, 2 * width);
  auto proj = describe<T>(p, activations, routed ? p.proj : &p.shared_proj, parts, width, p.hidden);
  if (routed) {
    for (auto* g : {&fc, &proj}) {
      g->experts_per_part = p.experts / p.parts;
      g->tiles = ws.tiles;
      g->sorted_pairs = ws.sorted_pairs;
    }
  }
  auto const tiles =
      static_cast<unsigned>(routed ? moe_max_tiles(p) : ceil_div(p.tokens, MOE_TILE_ROWS));
  dim3 const fc_grid(static_cast<unsigned>(ceil_div(width, GemmTile<T>::COLS / 2)), tiles);
  moe_fc<T><<<fc_grid, GemmTile<T>::THREADS, 0, stream>>>(fc, static_cast<T*>(activations));
  if (cudaError_t const status = cudaGetLastError(); status != cudaSuccess) return status;
  dim3 const proj_grid(static_cast<unsigned>(ceil_div(p.hidden, GemmTile<T>::COLS)), tiles);
  moe_proj<T><<<proj_grid, GemmTile<T>::THREADS, 0, stream>>>(
      proj, routed ? ws.pair_outputs : ws.shared_outputs);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_moe_experts(MoeParams const& p, MoeWorkspace const& ws, cudaStream_t stream) {
  static_assert(GemmTile<float>::ROWS == MOE_TILE_ROWS, "a tile of the work list is one GEMM tile");
  for (bool routed : {true, false}) {
    cudaError_t const status = p.type == Type::kFloat32
                                   ? launch<float>(p, ws, routed, stream)
                                   : launch<__nv_bfloat16>(p, ws, routed, stream);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

}  // namespace m3::kernels
