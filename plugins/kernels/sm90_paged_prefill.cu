#include <algorithm>
#include <cstdint>

#include "kernels/mma_sync.cuh"
#include "kernels/paged_prefill_tiles.cuh"
#include "kernels/programmatic_launch.cuh"
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
constexpr int KEYS = kBlockSize;          // a tile is a page
constexpr int STAGES = 2;                 // of queries, keys and values each
constexpr int HALF_TILE = ROWS * 64 * 2;  // bytes of the first or last 64 channels of 128 rows
constexpr int TILE = 2 * HALF_TILE;
static_assert(ROWS == KEYS && kHeadSize == 128, "queries, keys and values have tiles of one shape");

struct Tile {
  PrefillTile queries;
  int32_t head;  // KV head
};

struct __align__(1024) PrefillShared {
  uint8_t q[STAGES][TILE];  // the results as well, once a group has no more use for its rows
  uint8_t k[STAGES][TILE];
  uint8_t v[STAGES][TILE];
  uint64_t q_full[STAGES], q_empty[STAGES];
  uint64_t k_full[STAGES], k_empty[STAGES];
  uint64_t v_full[STAGES], v_empty[STAGES];
  int32_t page[STAGES];  // of the keys; -1: nothing of the tile counts
  Tile tile[STAGES];     // of the queries; without tokens: there are no more
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Named barriers: 0 is __syncthreads.
enum Barrier {
  kTurn = 1,
  kGroup = kTurn + CONSUMERS,
  kValuesCleared = kGroup + CONSUMERS,  // one a stage
};

using Ring = sm90::Ring<STAGES>;

__device__ int count_pages(Tile const& tile) {
  return (tile.queries.length() + KEYS - 1) / KEYS;
}

// The tiles of a block, those with most keys first, of neighbouring KV heads. Every second round
// goes backwards, so that the blocks' sums come out alike.
template <bool kListed>
class TileWalk {
 public:
  __device__ TileWalk(PagedPrefillParams const& p, int tile_tokens)
      : p_(p),
        tile_tokens_(tile_tokens),
        end_((kListed ? *p.only.count : prefill_slots(p, tile_tokens)) * p.num_kv_heads) {}

  // Without tokens behind the last tile.
  __device__ Tile next() {
    Tile tile{};
    while (base_ < end_) {
      int32_t const at = backwards_ ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
      int32_t const index = base_ + at;
      base_ += gridDim.x;
      backwards_ = !backwards_;
      if (index >= end_) continue;
      tile.head = index % p_.num_kv_heads;
      if constexpr (kListed) {
        WantedTile const listed = listed_tile(p_, index / p_.num_kv_heads, tile.head);
        tile.queries = listed;
        wanted = listed.wanted;
      } else {
        tile.queries = prefill_tile(p_, tile_tokens_, index / p_.num_kv_heads);
      }
      if (tile.queries.num_tokens > 0) return tile;
    }
    tile.queries.num_tokens = 0;
    // An empty tile of the list has a position, and would have pages to bring.
    if constexpr (kListed) tile.queries.first_position = 0;
    return tile;
  }

  uint32_t wanted = 0;  // tokens of the last tile, when it was listed

 private:
  PagedPrefillParams const& p_;
  int32_t tile_tokens_, end_, base_ = 0;
  bool backwards_ = false;
};

// One thread: announces the tiles and brings their queries, then keys and values from the last page
// to the first. The next tile is looked up while the first page of this one is on its way.
template <bool kListed>
__device__ void produce(PagedPrefillParams const& p, CUtensorMap const& q_map,
                        CUtensorMap const& kv_map, PrefillShared& shared, int group,
                        TileWalk<kListed> walk) {
  Ring queries, ring;
  Tile next = walk.next();
  auto const last_page_of = [&](Tile const& tile) {
    return page_of(p.tokens, tile.queries.request, count_pages(tile) - 1);
  };
  int32_t first_page = last_page_of(next);
  for (bool more = true; more; queries.next()) {
    Tile const tile = next;
    more = tile.queries.num_tokens > 0;
    uint32_t const q_full = shared_address(&shared.q_full[queries.stage]);
    sm90::barrier_wait(shared_address(&shared.q_empty[queries.stage]), queries.parity ^ 1);
    shared.tile[queries.stage] = tile;
    // Who computes a tile asks for its tokens, not for its request.
    if (kListed) shared.tile[queries.stage].queries.request = walk.wanted;
    int const count = count_pages(tile);
    if (count == 0) {
      sm90::barrier_arrive(q_full);
      next = walk.next();
      first_page = last_page_of(next);
      continue;
    }
    sm90::barrier_expect(q_full, TILE);
    for (int half = 0; half < 2; ++half) {
      sm90::load_tile(shared_address(shared.q[queries.stage]) + half * HALF_TILE, &q_map, q_full,
                      half * 64, tile.head * group, tile.queries.first_token);
    }
    int32_t next_page = first_page;
    for (int t = count - 1; t >= 0; --t, ring.next()) {
      int32_t const page = next_page;
      next_page = page_of(p.tokens, tile.queries.request, t - 1);
      int const s = ring.stage;
      uint32_t const k_full = shared_address(&shared.k_full[s]);
      sm90::barrier_wait(shared_address(&shared.k_empty[s]), ring.parity ^ 1);
      shared.page[s] = page;
      sm90::barrier_expect(k_full, TILE);
      for (int half = 0; half < 2; ++half) {  // a page of -1 lies outside the map: zeros
        sm90::load_tile(shared_address(shared.k[s]) + half * HALF_TILE, &kv_map, k_full, half * 64,
                        tile.head, 0, 2 * page);
      }
      uint32_t const v_full = shared_address(&shared.v_full[s]);
      sm90::barrier_wait(shared_address(&shared.v_empty[s]), ring.parity ^ 1);
      sm90::barrier_expect(v_full, TILE);
      for (int half = 0; half < 2; ++half) {
        sm90::load_tile(shared_address(shared.v[s]) + half * HALF_TILE, &kv_map, v_full, half * 64,
                        tile.head, 0, page < 0 ? -1 : 2 * page + 1);
      }
      if (t == count - 1) {
        next = walk.next();
        first_page = last_page_of(next);
      }
    }
  }
}

// Slots behind the tile's last query may hold NaN, and 0 * NaN would reach the sum. The first group
// clears them and goes on; a stage's barrier cannot be met again before the second has freed it.
__device__ void clear_values(PrefillShared& shared, int stage, int first_key, int consumer) {
  if (consumer > 0) return sm90::sync_threads(kValuesCleared + stage, CONSUMERS * WARPGROUP);
  auto* const v = reinterpret_cast<uint4*>(shared.v[stage]);
  constexpr int CHUNKS = 64 * 2 / 16;  // of a row; the swizzle stays within it
  for (int i = threadIdx.x % WARPGROUP; i < (KEYS - first_key) * CHUNKS; i += WARPGROUP) {
    v[first_key * CHUNKS + i] = make_uint4(0, 0, 0, 0);
    v[HALF_TILE / 16 + first_key * CHUNKS + i] = make_uint4(0, 0, 0, 0);
  }
  ptx::fence_async_proxy();
  sm90::sync_threads(kGroup, WARPGROUP);
  sm90::arrive_threads(kValuesCleared + stage, CONSUMERS * WARPGROUP);
}

// Softmax of the lane's two rows. Weights are 2^(score * scale + base) with minus a reference as
// base: the largest score when one exceeded `bound` last.
struct State {
  float base[2] = {0.f, 0.f};
  float bound[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0.f, 0.f};
  bool positive = false;  // no bound of the warp is negative
};

// `limit`: visible keys of the tile.
__device__ void mask(float (&s)[64], int const (&limit)[2]) {
  int const first = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    if (i / 4 * 8 + i % 2 >= limit[i / 2 % 2] - first) s[i] = -INFINITY;
  }
}

// The largest of the lane's scores of row h.
__device__ float largest_score(float const (&s)[64], int h) {
  float x[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    x[i % 2] = fmaxf(x[i % 2], fmaxf(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]));
  }
  return fmaxf(x[0], x[1]);
}

// The same when no bound is negative: floats then compare with it as integers do, three at a time.
__device__ int largest_bits(float const (&s)[64], int h) {
  int x[2] = {__float_as_int(s[2 * h]), __float_as_int(s[2 * h + 1])};
#pragma unroll
  for (int i = 1; i < 16; ++i) {
    x[i % 2] = __vimax3_s32(x[i % 2], __float_as_int(s[4 * i + 2 * h]),
                            __float_as_int(s[4 * i + 2 * h + 1]));
  }
  return max(x[0], x[1]);
}

struct Scale {
  float log2;   // of the softmax, times log2(e)
  float slack;  // as a score: a factor of 2^8 in the weights
};

// Scores become weights. The reference stays until a score exceeds it by the slack, which fp32 sums
// and bf16 weights bear, so that earlier sums rarely shrink. Returns whether any of this warp do,
// by `decay`.
__device__ bool weigh(State& state, float (&s)[64], float (&decay)[2], Scale scale) {
  bool exceeds;
  if (state.positive) {
    int const largest[2] = {largest_bits(s, 0), largest_bits(s, 1)};
    exceeds = (largest[0] > __float_as_int(state.bound[0])) |
              (largest[1] > __float_as_int(state.bound[1]));
  } else {
    float const largest[2] = {largest_score(s, 0), largest_score(s, 1)};
    exceeds = (largest[0] > state.bound[0]) | (largest[1] > state.bound[1]);
  }
  bool const shrinks = __any_sync(~0u, exceeds);
  if (shrinks) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // a row never depends on the warp's others
      float const largest = row_max(largest_score(s, h));
      decay[h] = 1.f;
      if (largest > state.bound[h]) {
        float const base = -largest * scale.log2;
        decay[h] = state.bound[h] == -INFINITY ? 0.f : exp2_flushed(base - state.base[h]);
        state.base[h] = base;
        state.bound[h] = largest + scale.slack;
        state.sum[h] *= decay[h];
      }
    }
    state.positive = __all_sync(~0u, state.bound[0] >= 0.f && state.bound[1] >= 0.f);
  }
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    int const h = i / 2 % 2;
    s[i] = exp2_flushed(fmaf(s[i], scale.log2, state.base[h]));
    state.sum[h] += s[i];
  }
  return shrinks;
}

__device__ void pack(uint32_t (&weights)[32], float const (&s)[64]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) weights[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
}

__device__ void multiply_keys(uint64_t q, uint64_t k, float (&s)[64]) {
#pragma unroll
  for (int step = 0; step < kHeadSize / 16; ++step) {
    uint32_t const at = step / 4 * HALF_TILE + step % 4 * 32;
    sm90::multiply_rows(s, sm90::advance(q, at), sm90::advance(k, at), step > 0);
  }
}

__device__ void multiply_values(uint64_t v, float (&out)[64], uint32_t const (&weights)[32]) {
#pragma unroll
  for (int step = 0; step < KEYS / 16; ++step) {
    sm90::multiply_columns(out, weights + 4 * step, sm90::advance(v, step * 16 * 128));
  }
}

// What a warpgroup keeps from tile to tile.
struct Consumer {
  int index, warp, lane;
  bool leads;  // the thread that frees buffers for the group
  Ring queries, keys, values;
};

// A warpgroup's 64 rows of a tile with `count` pages. The two groups take turns, so that one's
// softmax runs under the other's products; within each, the next page's scores are computed
// together with this page's sum.
__device__ void attend(PrefillShared& shared, PrefillTile const& tile, int count, int log_group,
                       Scale scale, Consumer& self, State& state, float (&out)[64]) {
  int const row = self.index * 64 + self.warp * 16 + self.lane / 4;  // and the eighth behind it
  int32_t const position[2] = {tile.first_position + (row >> log_group),
                               tile.first_position + ((row + 8) >> log_group)};
  uint64_t const q =
      sm90::row_descriptor(shared_address(shared.q[self.queries.stage]) + self.index * 64 * 128);
  uint64_t const all_keys = sm90::row_descriptor(shared_address(shared.k));
  uint64_t const all_values = sm90::column_descriptor(shared_address(shared.v), HALF_TILE);
  float s[64], decay[2];
  uint32_t weights[32];
  auto const weigh_page = [&](int t, int32_t page) {
    if (page < 0 || tile.first_position + 1 < (t + 1) * KEYS) {
      int limit[2];
      for (int h = 0; h < 2; ++h) limit[h] = page < 0 ? 0 : position[h] + 1 - t * KEYS;
      mask(s, limit);
    }
    return weigh(state, s, decay, scale);
  };
  auto const wait_keys = [&] {
    sm90::barrier_wait(shared_address(&shared.k_full[self.keys.stage]), self.keys.parity);
    return shared.page[self.keys.stage];
  };
  auto const wait_values = [&] {
    sm90::barrier_wait(shared_address(&shared.v_full[self.values.stage]), self.values.parity);
  };
  auto const free_keys = [&] {
    if (self.leads) sm90::barrier_arrive(shared_address(&shared.k_empty[self.keys.stage]));
    self.keys.next();
  };
  auto const free_values = [&] {
    if (self.leads) sm90::barrier_arrive(shared_address(&shared.v_empty[self.values.stage]));
    self.values.next();
  };
  auto const start_scores = [&] {
    sm90::fence();
    multiply_keys(q, sm90::advance(all_keys, self.keys.stage * TILE), s);
    sm90::commit();
  };
  auto const start_sum = [&] {
    multiply_values(sm90::advance(all_values, self.values.stage * TILE), out, weights);
    sm90::commit();
  };

  int32_t page = wait_keys();
  sm90::sync_threads(kGroup + self.index, WARPGROUP);  // all have read the page's number
  start_scores();
  sm90::wait<0>();
  sm90::pin(s);
  free_keys();
  weigh_page(count - 1, page);
  pack(weights, s);
  if (int const visible = tile.length() - (count - 1) * KEYS; visible < KEYS) {
    wait_values();
    clear_values(shared, self.values.stage, visible, self.index);
  }
  for (int t = count - 2; t >= 0; --t) {
    page = wait_keys();
    sm90::sync_threads(kTurn + self.index, 2 * WARPGROUP);
    start_scores();
    wait_values();
    start_sum();
    sm90::arrive_threads(kTurn + 1 - self.index, 2 * WARPGROUP);
    sm90::wait<1>();
    sm90::pin(s);
    free_keys();
    bool const shrinks = weigh_page(t, page);
    sm90::wait<0>();
    sm90::pin(out);
    free_values();
    pack(weights, s);
    if (shrinks) {
#pragma unroll
      for (int i = 0; i < 64; ++i) out[i] *= decay[i / 2 % 2];
    }
  }
  wait_values();
  sm90::fence();
  start_sum();
  sm90::wait<0>();
  sm90::pin(out);
  free_values();
}

// Writes the warp's 16 rows and frees the queries: results go through where those lay, so that a
// row leaves in one piece.
template <bool kListed>
__device__ void store_rows(PagedPrefillParams const& p, PrefillShared& shared, Tile const& tile,
                           int log_group, Consumer const& self, State const& state,
                           float const (&out)[64]) {
  int const first_row = self.index * 64 + self.warp * 16;
  uint8_t* const rows = shared.q[self.queries.stage] + first_row * 128;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float const sum = row_sum(state.sum[h]);
    float const factor = sum == 0.f ? 0.f : 1.f / sum;
#pragma unroll
    for (int n = 0; n < kHeadSize / 8; ++n) {
      uint32_t const at = n / 8 * HALF_TILE + swizzled<8>(self.lane / 4 + 8 * h, n % 8);
      *reinterpret_cast<uint32_t*>(rows + at + self.lane % 4 * 4) =
          pack_bf16(out[4 * n + 2 * h] * factor, out[4 * n + 2 * h + 1] * factor);
    }
  }
  __syncwarp();
  int const chunk = self.lane % 16;
  uint4 pieces[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t const at = chunk / 8 * HALF_TILE + swizzled<8>(2 * i + self.lane / 16, chunk % 8);
    pieces[i] = *reinterpret_cast<uint4 const*>(rows + at);
  }
  ptx::fence_async_proxy();
  __syncwarp();
  if (self.lane == 0) sm90::barrier_arrive(shared_address(&shared.q_empty[self.queries.stage]));
  int const group = 1 << log_group;
  int64_t const first_head = int64_t{tile.queries.first_token} * p.num_heads + tile.head * group;
  auto* const to = reinterpret_cast<uint4*>(static_cast<Bf16*>(p.out) + first_head * kHeadSize);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    int const row = first_row + 2 * i + self.lane / 16;
    int const head = (row >> log_group) * p.num_heads + (row & (group - 1));
    bool const is_wanted =
        kListed ? WantedTile{tile.queries, static_cast<uint32_t>(tile.queries.request)}.wants(
                      row >> log_group)
                : row < tile.queries.num_tokens << log_group;
    if (is_wanted) to[head * (kHeadSize / 8) + chunk] = pieces[i];
  }
}

template <bool kListed>
__device__ void consume(PagedPrefillParams const& p, PrefillShared& shared, int group) {
  Consumer self;
  self.index = __shfl_sync(~0u, threadIdx.x / WARPGROUP, 0) - 1;  // which ptxas sees is uniform
  self.warp = threadIdx.x % WARPGROUP / 32;
  self.lane = threadIdx.x % 32;
  self.leads = threadIdx.x % WARPGROUP == 0;
  int const log_group = __ffs(group) - 1;
  float const log2_scale = p.softmax_scale * 1.44269504088896341f;
  Scale const scale{log2_scale, 8.f / log2_scale};
  if (self.index == 1) sm90::arrive_threads(kTurn, 2 * WARPGROUP);  // the first group begins
  for (;; self.queries.next()) {
    int const stage = self.queries.stage;
    sm90::barrier_wait(shared_address(&shared.q_full[stage]), self.queries.parity);
    Tile const tile = shared.tile[stage];
    if (tile.queries.num_tokens == 0) break;
    State state;
    float out[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) out[i] = 0.f;
    if (int const count = count_pages(tile); count > 0) {
      attend(shared, tile.queries, count, log_group, scale, self, state, out);
    }
    store_rows<kListed>(p, shared, tile, log_group, self, state, out);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// Grid: a block for each multiprocessor.
template <bool kListed>
__global__ void __launch_bounds__(THREADS, 1)
    prefill_kernel(__grid_constant__ PagedPrefillParams const p,
                   __grid_constant__ CUtensorMap const q_map,
                   __grid_constant__ CUtensorMap const kv_map, int tile_tokens) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<PrefillShared*>(memory);
  if constexpr (kListed) {
    wait_for_previous_kernel();
  } else {
    clear_context_padding(p);
  }
  int const group = p.num_heads / p.num_kv_heads;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      sm90::barrier_init(shared_address(&shared.q_full[s]), 1);
      sm90::barrier_init(shared_address(&shared.q_empty[s]), CONSUMERS * WARPGROUP / 32);
      sm90::barrier_init(shared_address(&shared.k_full[s]), 1);
      sm90::barrier_init(shared_address(&shared.v_full[s]), 1);
      sm90::barrier_init(shared_address(&shared.k_empty[s]), CONSUMERS);
      sm90::barrier_init(shared_address(&shared.v_empty[s]), CONSUMERS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;\n");
    if (threadIdx.x == 0)
      produce(p, q_map, kv_map, shared, group, TileWalk<kListed>(p, tile_tokens));
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;\n");
    consume<kListed>(p, shared, group);
  }
#endif
}

bool takes_heads(int32_t num_heads, int32_t num_kv_heads) {
  int32_t const group = num_heads / num_kv_heads;
  return group * num_kv_heads == num_heads && (group & (group - 1)) == 0 && group <= kMaxGroup;
}

}  // namespace

bool has_sm90_paged_prefill(int32_t num_heads, int32_t num_kv_heads) {
  return takes_heads(num_heads, num_kv_heads) && runs_sm90(prefill_kernel<false>);
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
  bool const is_listed = p.only.tiles != nullptr;
  auto* const kernel = is_listed ? prefill_kernel<true> : prefill_kernel<false>;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                sizeof(PrefillShared));
  if (status != cudaSuccess) return status;
  int processors = 0;
  status = count_processors(processors);
  if (status != cudaSuccess) return status;
  auto const tokens = static_cast<int>(tile_tokens);
  int const slots = is_listed ? p.only.most : prefill_slots(p, tokens);
  int const blocks = std::min(slots * p.num_kv_heads, processors);
  if (is_listed) {
    return launch_behind(kernel, blocks, THREADS, sizeof(PrefillShared), stream, p, q_map, kv_map,
                         tokens);
  }
  kernel<<<blocks, THREADS, sizeof(PrefillShared), stream>>>(p, q_map, kv_map, tokens);
  return cudaGetLastError();
}

}  // namespace m3::kernels
