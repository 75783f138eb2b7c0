#pragma once

#include "kernels/packed_tokens.cuh"
#include "kernels/vectors.cuh"

// Attention of one row = one (query token, KV head) over a list of pages: the shared body of
// PagedAttention (every block of the sequence) and SparseAttention (the selected ones).
namespace m3::kernels {

constexpr int kAttentionWarps = 4;
constexpr int kAttentionThreads = 32 * kAttentionWarps;
constexpr int kTileKeys = 32;  // keys in shared memory at once: one a lane
constexpr int kHeadsPerWarp = kMaxGroup / kAttentionWarps;
static_assert(kBlockSize % kTileKeys == 0, "a tile never spans two pages");
static_assert(kHeadSize == 4 * 32, "a warp holds one head, four channels a lane");

// Strided view of a paged pool, in elements. One kernel reads a [P, 2, B, Hkv, D] pool head by head
// (page stride 2*B*Hkv*D, head stride D) or as single-head virtual pages (page stride D, head
// stride 0, id page*2*B*Hkv + head).
template <class C>
struct PagedView {
  C const* k;
  C const* v;
  int64_t page_stride;
  int64_t head_stride;
  int64_t token_stride;
  float const* scale;  // [1], real = stored * scale; null when stored as is
};

// A page as one row sees it: its id in the view and how many of its first keys are visible.
struct PageRef {
  int64_t id;
  int32_t visible;  // 0: skip, the id means nothing
};

struct AttentionTile {
  // Four floats of padding a row spread eight lanes' keys over all banks.
  float k[kTileKeys][kHeadSize + 4];
  float v[kTileKeys][kHeadSize];
  float q[kMaxGroup][kHeadSize];
  float weights[kMaxGroup][kTileKeys];
};

// Keys [first, first + kTileKeys) of a page. Keys that are not visible become zeros without being
// read: unused slots may hold NaN, and 0 * NaN would reach the sum.
template <class C>
__device__ void load_tile(AttentionTile& tile, PagedView<C> const& view, int head, PageRef page,
                          int first) {
  float const scale = view.scale == nullptr ? 1.f : *view.scale;
  int64_t const base = page.id * view.page_stride + head * view.head_stride;
  int const channel = threadIdx.x % 32 * 4;
  for (int key = threadIdx.x / 32; key < kTileKeys; key += kAttentionWarps) {
    float4 k = make_float4(0.f, 0.f, 0.f, 0.f), v = k;
    if (first + key < page.visible) {
      int64_t const at = base + (first + key) * view.token_stride + channel;
      k = load4(view.k + at) * scale;
      v = load4(view.v + at) * scale;
    }
    *reinterpret_cast<float4*>(&tile.k[key][channel]) = k;
    *reinterpret_cast<float4*>(&tile.v[key][channel]) = v;
  }
}

// What a warp keeps of its heads (warp, warp + 4, ...) over the tiles: the running maximum and sum
// of the softmax, and its lane's four channels of the weighted sum.
struct SoftmaxState {
  float maximum[kHeadsPerWarp];
  float sum[kHeadsPerWarp];
  float4 out[kHeadsPerWarp];
};

// Adds `count` keys of the tile. Lanes are keys for the scores, then channels for the sum.
__device__ inline void attend_tile(AttentionTile& tile, SoftmaxState& state, int group, int count,
                                   float softmax_scale) {
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float score[kHeadsPerWarp] = {};
#pragma unroll 4
  for (int channel = 0; channel < kHeadSize; channel += 4) {
    float4 const k = load4(&tile.k[lane][channel]);
#pragma unroll
    for (int i = 0; i < kHeadsPerWarp; ++i) {
      int const head = warp + i * kAttentionWarps;
      if (head < group) score[i] = dot4(load4(&tile.q[head][channel]), k, score[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kHeadsPerWarp; ++i) {
    int const head = warp + i * kAttentionWarps;
    if (head >= group) continue;
    float const s = lane < count ? score[i] * softmax_scale : -INFINITY;
    float const maximum = fmaxf(state.maximum[i], warp_max(s));
    // With every score at -inf so far, -inf - -inf would be NaN.
    float const base = maximum == -INFINITY ? 0.f : maximum;
    float const weight = lane < count ? expf(s - base) : 0.f;
    float const decay = expf(state.maximum[i] - base);
    state.maximum[i] = maximum;
    state.sum[i] = state.sum[i] * decay + warp_sum(weight);
    state.out[i] = state.out[i] * decay;
    tile.weights[head][lane] = weight;
  }
  __syncwarp();  // a head's weights are written and read by one warp
#pragma unroll 2
  for (int key = 0; key < kTileKeys; key += 4) {
    float4 v[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) v[j] = load4(&tile.v[key + j][4 * lane]);
#pragma unroll
    for (int i = 0; i < kHeadsPerWarp; ++i) {
      int const head = warp + i * kAttentionWarps;
      if (head >= group) continue;
      float4 const w = load4(&tile.weights[head][key]);
      axpy4(state.out[i], v[0], w.x);
      axpy4(state.out[i], v[1], w.y);
      axpy4(state.out[i], v[2], w.z);
      axpy4(state.out[i], v[3], w.w);
    }
  }
}

// One CTA. `q` and `out` are the row's `group` heads, [group, D]. `page(i)` for 0 <= i < num_pages
// gives a PageRef, the same on every thread. A row without keys is zero.
template <class T, class C, class PageOf>
__device__ void attend_row(AttentionTile& tile, T const* __restrict__ q, T* __restrict__ out,
                           int group, float softmax_scale, PagedView<C> const& view, int head,
                           int num_pages, PageOf page) {
  SoftmaxState state;
#pragma unroll
  for (int i = 0; i < kHeadsPerWarp; ++i) {
    state.maximum[i] = -INFINITY;
    state.sum[i] = 0.f;
    state.out[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }
  if (num_pages > 0) {  // padding rows may hold anything
    for (int i = threadIdx.x; i < group * kHeadSize / 4; i += kAttentionThreads) {
      reinterpret_cast<float4*>(tile.q)[i] = load4(q + 4 * i);
    }
  }
  for (int i = 0; i < num_pages; ++i) {
    PageRef const ref = page(i);
    for (int first = 0; first < ref.visible; first += kTileKeys) {
      __syncthreads();  // the previous tile has been read
      load_tile(tile, view, head, ref, first);
      __syncthreads();  // the tile and, at first, q are complete
      attend_tile(tile, state, group, ref.visible - first, softmax_scale);
    }
  }
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kHeadsPerWarp; ++i) {
    int const h = warp + i * kAttentionWarps;
    if (h >= group) continue;
    float4 const y = state.sum[i] == 0.f ? state.out[i] : state.out[i] / state.sum[i];
    store4(out + h * kHeadSize + 4 * lane, y);
  }
}

// A logical block of the token's sequence: 0 visible keys when it lies beyond the token or the page
// table has no page for it.
__device__ inline PageRef causal_page(PackedTokens const& tokens, TokenPlace place, int32_t block) {
  int32_t const page = page_of(tokens, place.request, block);
  if (page < 0 || block > place.own_block()) return {0, 0};
  return {page, min(kBlockSize, place.position + 1 - block * kBlockSize)};
}

}  // namespace m3::kernels
