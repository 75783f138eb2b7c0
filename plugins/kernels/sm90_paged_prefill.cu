#include <algorithm>
#include <cstdint>

#include "kernels/mma_sync.cuh"
#include "kernels/paged_prefill_tiles.cuh"
#include "kernels/sm90_attention_mma.cuh"
#include "kernels/tensor_map.h"
#include "kernels/this_device.h"

namespace m3::kernels {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int WARPGROUP = 128;
constexpr int CONSUMERS = 2;  // warpgroups of 64 query rows
constexpr int THREADS = WARPGROUP * (1 + CONSUMERS);
constexpr int ROWS = kPrefillRows;
constexpr int KEYS = kBlockSize;  // a tile is a page
constexpr int STAGES = 2;
constexpr int HALF_TILE = ROWS * 64 * 2;  // bytes of the first or last 64 channels of 128 rows
constexpr int TILE = 2 * HALF_TILE;
static_assert(ROWS == KEYS && kHeadSize == 128, "queries, keys and values have tiles of one shape");

struct __align__(1024) PrefillShared {
  uint8_t q[TILE];
  uint8_t k[STAGES][TILE];
  uint8_t v[STAGES][TILE];
  uint64_t q_full, q_empty;
  uint64_t k_full[STAGES], k_empty[STAGES];
  uint64_t v_full[STAGES], v_empty[STAGES];
  int32_t page[STAGES];  // of the keys; -1: nothing of the tile counts
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Named barriers: 0 is __syncthreads.
enum Barrier { kTurn = 1, kPageRead = kTurn + CONSUMERS, kValuesCleared = kPageRead + CONSUMERS };

using Ring = sm90::Ring<STAGES>;

// The tiles of a block, those with most keys first, of neighbouring KV heads. Every second round
// goes backwards, so that the blocks' sums come out alike.
class TileWalk {
 public:
  __device__ TileWalk(PagedPrefillParams const& p, int tile_tokens)
      : p_(p), tile_tokens_(tile_tokens), end_(prefill_slots(p, tile_tokens) * p.num_kv_heads) {}

  // False behind the last tile.
  __device__ bool next() {
    while (base_ < end_) {
      int32_t const at = backwards_ ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
      int32_t const index = base_ + at;
      base_ += gridDim.x;
      backwards_ = !backwards_;
      if (index >= end_) continue;
      head = index % p_.num_kv_heads;
      tile = prefill_tile(p_, tile_tokens_, index / p_.num_kv_heads);
      if (tile.num_tokens > 0) return true;
    }
    return false;
  }
  __device__ int num_pages() const { return (tile.length() + KEYS - 1) / KEYS; }

  PrefillTile tile;
  int head;

 private:
  PagedPrefillParams const& p_;
  int32_t tile_tokens_, end_, base_ = 0;
  bool backwards_ = false;
};

// One thread: brings the queries, then keys and values from the last page to the first.
__device__ void produce(PagedPrefillParams const& p, CUtensorMap const& q_map,
                        CUtensorMap const& kv_map, PrefillShared& shared, int group,
                        TileWalk walk) {
  uint32_t const q_full = shared_address(&shared.q_full);
  Ring ring;
  uint32_t q_parity = 1;
  while (walk.next()) {
    PrefillTile const& tile = walk.tile;
    int const count = walk.num_pages();
    if (count == 0) continue;
    int32_t page = page_of(p.tokens, tile.request, count - 1);
    sm90::barrier_wait(shared_address(&shared.q_empty), q_parity);
    q_parity ^= 1;
    sm90::barrier_expect(q_full, TILE);
    for (int half = 0; half < 2; ++half) {
      sm90::load_tile(shared_address(shared.q) + half * HALF_TILE, &q_map, q_full, half * 64,
                      walk.head * group, tile.first_token);
    }
    for (int t = count - 1; t >= 0; --t, ring.next()) {
      int32_t const next_page = page_of(p.tokens, tile.request, t - 1);
      int const s = ring.stage;
      uint32_t const k_full = shared_address(&shared.k_full[s]);
      sm90::barrier_wait(shared_address(&shared.k_empty[s]), ring.parity ^ 1);
      shared.page[s] = page;
      sm90::barrier_expect(k_full, TILE);
      for (int half = 0; half < 2; ++half) {  // a page of -1 lies outside the map: zeros
        sm90::load_tile(shared_address(shared.k[s]) + half * HALF_TILE, &kv_map, k_full, half * 64,
                        walk.head, 0, 2 * page);
      }
      uint32_t const v_full = shared_address(&shared.v_full[s]);
      sm90::barrier_wait(shared_address(&shared.v_empty[s]), ring.parity ^ 1);
      sm90::barrier_expect(v_full, TILE);
      for (int half = 0; half < 2; ++half) {
        sm90::load_tile(shared_address(shared.v[s]) + half * HALF_TILE, &kv_map, v_full, half * 64,
                        walk.head, 0, page < 0 ? -1 : 2 * page + 1);
      }
      page = next_page;
    }
  }
}

// Slots behind the sequence may hold NaN, and 0 * NaN would reach the sum.
__device__ void clear_values(PrefillShared& shared, int stage, int first_key) {
  int const thread = threadIdx.x - WARPGROUP;
  auto* const v = reinterpret_cast<uint4*>(shared.v[stage]);
  constexpr int CHUNKS = 64 * 2 / 16;  // of a row; the swizzle stays within it
  for (int i = thread; i < (KEYS - first_key) * CHUNKS; i += CONSUMERS * WARPGROUP) {
    v[first_key * CHUNKS + i] = make_uint4(0, 0, 0, 0);
    v[HALF_TILE / 16 + first_key * CHUNKS + i] = make_uint4(0, 0, 0, 0);
  }
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
  sm90::sync_threads(kValuesCleared, CONSUMERS * WARPGROUP);
}

struct State {
  float maximum[2] = {-INFINITY, -INFINITY};  // of the lane's two rows
  float sum[2] = {0.f, 0.f};
};

// Scores become weights; returns how much earlier sums shrink. `limit`: visible keys of the tile.
__device__ void weigh(State& state, float (&s)[64], float (&decay)[2], float scale_log2,
                      bool masked, int const (&limit)[2]) {
  int const lane = threadIdx.x % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      float& x = s[i / 2 * 4 + 2 * h + i % 2];
      if (masked && i / 2 * 8 + lane % 4 * 2 + i % 2 >= limit[h]) x = -INFINITY;
      largest = fmaxf(largest, x);
    }
    float const maximum = fmaxf(state.maximum[h], row_max(largest) * scale_log2);
    // With every score at -inf so far, -inf - -inf would be NaN.
    float const base = maximum == -INFINITY ? 0.f : maximum;
    decay[h] = exp2f(state.maximum[h] - base);
    state.maximum[h] = maximum;
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      float& x = s[i / 2 * 4 + 2 * h + i % 2];
      x = exp2f(fmaf(x, scale_log2, -base));
      sum += x;
    }
    state.sum[h] = state.sum[h] * decay[h] + sum;
  }
}

__device__ void pack(uint32_t (&weights)[32], float const (&s)[64]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) weights[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
}

__device__ void multiply_keys(PrefillShared const& shared, int stage, int consumer,
                              float (&s)[64]) {
  uint32_t const q = shared_address(shared.q) + consumer * 64 * 128;
  uint32_t const k = shared_address(shared.k[stage]);
#pragma unroll
  for (int step = 0; step < kHeadSize / 16; ++step) {
    uint32_t const at = step / 4 * HALF_TILE + step % 4 * 32;
    sm90::multiply_rows(s, sm90::row_descriptor(q + at), sm90::row_descriptor(k + at), step > 0);
  }
}

__device__ void multiply_values(PrefillShared const& shared, int stage, float (&out)[64],
                                uint32_t const (&weights)[32]) {
  uint32_t const v = shared_address(shared.v[stage]);
#pragma unroll
  for (int step = 0; step < KEYS / 16; ++step) {
    sm90::multiply_columns(out, weights + 4 * step,
                           sm90::column_descriptor(v + step * 16 * 128, HALF_TILE));
  }
}

// What a warpgroup keeps from tile to tile.
struct Consumer {
  int index, warp, lane;
  bool leads;  // the thread that frees buffers for the group
  Ring keys, values;
  uint32_t q_parity = 0;
};

// A warpgroup's 64 rows of a tile with `count` pages. The two groups take turns, so that one's
// softmax runs under the other's products; within each, the next page's scores are computed
// together with this page's sum.
__device__ void attend(PagedPrefillParams const& p, PrefillShared& shared, PrefillTile const& tile,
                       int group, int count, Consumer& self, State& state, float (&out)[64]) {
  int const row = self.index * 64 + self.warp * 16 + self.lane / 4;  // and the eighth behind it
  int32_t const position[2] = {tile.first_position + row / group,
                               tile.first_position + (row + 8) / group};
  float const scale_log2 = p.softmax_scale * 1.44269504088896341f;
  float s[64], decay[2];
  uint32_t weights[32];
  auto const weigh_page = [&](int t, int32_t page) {
    int limit[2];
    for (int h = 0; h < 2; ++h) limit[h] = page < 0 ? 0 : position[h] + 1 - t * KEYS;
    weigh(state, s, decay, scale_log2, page < 0 || tile.first_position + 1 < (t + 1) * KEYS, limit);
  };
  auto const wait_keys = [&] {
    sm90::barrier_wait(shared_address(&shared.k_full[self.keys.stage]), self.keys.parity);
    return shared.page[self.keys.stage];
  };
  auto const wait_values = [&] {
    sm90::barrier_wait(shared_address(&shared.v_full[self.values.stage]), self.values.parity);
  };
  auto const free_keys = [&](bool last) {
    if (self.leads) sm90::barrier_arrive(shared_address(&shared.k_empty[self.keys.stage]));
    if (self.leads && last) sm90::barrier_arrive(shared_address(&shared.q_empty));
    self.keys.next();
  };
  auto const free_values = [&] {
    if (self.leads) sm90::barrier_arrive(shared_address(&shared.v_empty[self.values.stage]));
    self.values.next();
  };

  sm90::barrier_wait(shared_address(&shared.q_full), self.q_parity);
  self.q_parity ^= 1;
  int32_t page = wait_keys();
  sm90::sync_threads(kPageRead + self.index, WARPGROUP);
  sm90::fence();
  multiply_keys(shared, self.keys.stage, self.index, s);
  sm90::commit();
  sm90::wait<0>();
  sm90::pin(s);
  free_keys(count == 1);
  weigh_page(count - 1, page);
  pack(weights, s);
  if (int const visible = tile.length() - (count - 1) * KEYS; visible < KEYS) {
    wait_values();
    clear_values(shared, self.values.stage, visible);
  }
  for (int t = count - 2; t >= 0; --t) {
    page = wait_keys();
    sm90::sync_threads(kTurn + self.index, 2 * WARPGROUP);
    sm90::fence();
    multiply_keys(shared, self.keys.stage, self.index, s);
    sm90::commit();
    wait_values();
    multiply_values(shared, self.values.stage, out, weights);
    sm90::commit();
    sm90::arrive_threads(kTurn + 1 - self.index, 2 * WARPGROUP);
    sm90::wait<1>();
    sm90::pin(s);
    free_keys(t == 0);
    weigh_page(t, page);
    sm90::wait<0>();
    sm90::pin(out);
    free_values();
    pack(weights, s);
#pragma unroll
    for (int i = 0; i < 64; ++i) out[i] *= decay[i / 2 % 2];
  }
  wait_values();
  sm90::fence();
  multiply_values(shared, self.values.stage, out, weights);
  sm90::commit();
  sm90::wait<0>();
  sm90::pin(out);
  free_values();
}

__device__ void consume(PagedPrefillParams const& p, PrefillShared& shared, int group,
                        TileWalk walk) {
  Consumer self;
  self.index = threadIdx.x / WARPGROUP - 1;
  self.warp = threadIdx.x % WARPGROUP / 32;
  self.lane = threadIdx.x % 32;
  self.leads = threadIdx.x % WARPGROUP == 0;
  if (self.index == 1) sm90::arrive_threads(kTurn, 2 * WARPGROUP);  // the first group begins
  while (walk.next()) {
    State state;
    float out[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) out[i] = 0.f;
    if (int const count = walk.num_pages(); count > 0) {
      attend(p, shared, walk.tile, group, count, self, state, out);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float const sum = row_sum(state.sum[h]);
      int const row = self.index * 64 + self.warp * 16 + self.lane / 4 + 8 * h;
      if (row >= walk.tile.num_tokens * group) continue;
      float const factor = sum == 0.f ? 0.f : 1.f / sum;
      int64_t const head = int64_t{walk.tile.first_token + row / group} * p.num_heads +
                           walk.head * group + row % group;
      auto* const to = static_cast<Bf16*>(p.out) + head * kHeadSize + self.lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kHeadSize / 8; ++n) {
        *reinterpret_cast<uint32_t*>(to + 8 * n) =
            pack_bf16(out[4 * n + 2 * h] * factor, out[4 * n + 2 * h + 1] * factor);
      }
    }
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// Grid: a block for each multiprocessor.
__global__ void __launch_bounds__(THREADS, 1)
    prefill_kernel(__grid_constant__ PagedPrefillParams const p,
                   __grid_constant__ CUtensorMap const q_map,
                   __grid_constant__ CUtensorMap const kv_map, int tile_tokens) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<PrefillShared*>(memory);
  clear_context_padding(p);
  int const group = p.num_heads / p.num_kv_heads;
  if (threadIdx.x == 0) {
    sm90::barrier_init(shared_address(&shared.q_full), 1);
    sm90::barrier_init(shared_address(&shared.q_empty), CONSUMERS);
    for (int s = 0; s < STAGES; ++s) {
      sm90::barrier_init(shared_address(&shared.k_full[s]), 1);
      sm90::barrier_init(shared_address(&shared.v_full[s]), 1);
      sm90::barrier_init(shared_address(&shared.k_empty[s]), CONSUMERS);
      sm90::barrier_init(shared_address(&shared.v_empty[s]), CONSUMERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;\n");
    if (threadIdx.x == 0) produce(p, q_map, kv_map, shared, group, TileWalk(p, tile_tokens));
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;\n");
    consume(p, shared, group, TileWalk(p, tile_tokens));
  }
#endif
}

bool takes_heads(int32_t num_heads, int32_t num_kv_heads) {
  int32_t const group = num_heads / num_kv_heads;
  return group * num_kv_heads == num_heads && (group & (group - 1)) == 0 && group <= kMaxGroup;
}

}  // namespace

bool has_sm90_paged_prefill(int32_t num_heads, int32_t num_kv_heads) {
  return takes_heads(num_heads, num_kv_heads) && runs_sm90(prefill_kernel);
}

cudaError_t launch_sm90_paged_prefill(PagedPrefillParams const& p, cudaStream_t stream) {
  if (p.num_tokens == 0) return cudaSuccess;
  if (!takes_heads(p.num_heads, p.num_kv_heads)) return cudaErrorInvalidValue;
  auto const group = static_cast<cuuint32_t>(p.num_heads / p.num_kv_heads);
  auto const tile_tokens = ROWS / group;
  CUtensorMap q_map, kv_map;
  cuuint64_t const q_dims[] = {kHeadSize, static_cast<cuuint64_t>(p.num_heads),
                               static_cast<cuuint64_t>(p.tokens.num_tokens)};
  cuuint32_t const q_box[] = {64, group, tile_tokens};
  cudaError_t status = encode_tensor_map(q_map, p.q, 3, q_dims, q_box);
  if (status != cudaSuccess) return status;
  status = encode_kv_map(kv_map, p.kv_cache, p.num_kv_heads, p.num_pages);
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(prefill_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                sizeof(PrefillShared));
  if (status != cudaSuccess) return status;
  int processors = 0;
  status = count_processors(processors);
  if (status != cudaSuccess) return status;
  int const tiles = prefill_slots(p, static_cast<int>(tile_tokens)) * p.num_kv_heads;
  prefill_kernel<<<std::min(tiles, processors), THREADS, sizeof(PrefillShared), stream>>>(
      p, q_map, kv_map, static_cast<int>(tile_tokens));
  return cudaGetLastError();
}

}  // namespace m3::kernels
