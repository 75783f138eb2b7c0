#include <algorithm>
#include <cstdint>

#include "kernels/mma_sync.cuh"
#include "kernels/paged_prefill_walk.cuh"
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

struct __align__(1024) PrefillShared {
  uint8_t q[STAGES][TILE];  // the results as well, once a group has no more use for its rows
  uint8_t k[STAGES][TILE];
  uint8_t v[STAGES][TILE];
  uint64_t q_full[STAGES], q_empty[STAGES];
  uint64_t k_full[STAGES], k_empty[STAGES];
  uint64_t v_full[STAGES], v_empty[STAGES];
  int32_t page[STAGES];   // of the keys; -1: nothing of the tile counts
  HeadTile tile[STAGES];  // of the queries; without tokens: there are no more
  Choice choice[STAGES];
  uint64_t choice_full[STAGES];
  int32_t ids[ROWS * kMaxTopK];  // of a tile's tokens
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Named barriers: 0 is __syncthreads.
enum Barrier {
  kTurn = 1,
  kGroup = kTurn + CONSUMERS,
  kValuesCleared = kGroup + CONSUMERS,  // one a stage
};

using Ring = sm90::Ring<STAGES>;

// A warp: announces the tiles and brings their queries, then keys and values from the last page to
// the first. The next tile is looked up while the first page of this one is on its way.
template <bool kSelects>
__device__ void produce(PagedPrefillParams const& p, CUtensorMap const& q_map,
                        CUtensorMap const& kv_map, PrefillShared& shared, int group,
                        int tile_tokens) {
  bool const leads = threadIdx.x == 0;
  // Here only inputs of the step are read, behind the wait results of its kernels.
  if (kSelects && p.joined.flags != nullptr) wait_for_previous_kernel();
  TileWalk<kSelects> walk(p, tile_tokens);
  Ring queries, ring;
  HeadTile next = walk.next();
  auto const last_page_of = [&](HeadTile const& tile) {
    return page_of(p.tokens, tile.queries.request, count_pages<kSelects>(p, tile) - 1);
  };
  int32_t first_page = last_page_of(next);
  wait_for_previous_kernel();
  for (bool more = true; more; queries.next()) {
    HeadTile const tile = next;
    more = tile.queries.num_tokens > 0;
    uint32_t const q_full = shared_address(&shared.q_full[queries.stage]);
    sm90::barrier_wait(shared_address(&shared.q_empty[queries.stage]), queries.parity ^ 1);
    if (leads) shared.tile[queries.stage] = tile;
    int count = more ? count_pages<kSelects>(p, tile) : 0;
    if (count == 0) {
      if (leads) sm90::barrier_arrive(q_full);
      next = walk.next();
      first_page = last_page_of(next);
      continue;
    }
    if (leads) {
      sm90::barrier_expect(q_full, TILE);
      for (int half = 0; half < 2; ++half) {
        sm90::load_tile(shared_address(shared.q[queries.stage]) + half * HALF_TILE, &q_map, q_full,
                        half * 64, tile.head * group, tile.queries.first_token);
      }
    }
    Choice const& choice = shared.choice[queries.stage];
    int32_t next_page = first_page;
    for (int i = 0; i < count; ++i, ring.next()) {
      int32_t const page = next_page;
      // Of the first page's successor it is only likely which block that is.
      bool const is_known = kSelects && i > 0;
      int const block = !is_known ? count - 2 - i : i + 1 < count ? choice.blocks[i + 1] : -1;
      next_page = page_of(p.tokens, tile.queries.request, block);
      int const s = ring.stage;
      uint32_t const k_full = shared_address(&shared.k_full[s]);
      uint32_t const v_full = shared_address(&shared.v_full[s]);
      sm90::barrier_wait(shared_address(&shared.k_empty[s]), ring.parity ^ 1);
      if (leads) {
        shared.page[s] = page;
        sm90::barrier_expect(k_full, TILE);
        for (int half = 0; half < 2; ++half) {  // a page of -1 lies outside the map: zeros
          sm90::load_tile(shared_address(shared.k[s]) + half * HALF_TILE, &kv_map, k_full,
                          half * 64, tile.head, 0, 2 * page);
        }
      }
      sm90::barrier_wait(shared_address(&shared.v_empty[s]), ring.parity ^ 1);
      if (leads) {
        sm90::barrier_expect(v_full, TILE);
        for (int half = 0; half < 2; ++half) {
          sm90::load_tile(shared_address(shared.v[s]) + half * HALF_TILE, &kv_map, v_full,
                          half * 64, tile.head, 0, page < 0 ? -1 : 2 * page + 1);
        }
      }
      if (i > 0) continue;
      next = walk.next();
      first_page = last_page_of(next);
      if constexpr (kSelects) {
        sm90::barrier_wait(shared_address(&shared.choice_full[queries.stage]), queries.parity);
        int const second = count - 2;
        count = choice.count;
        if (count > 1 && choice.blocks[1] != second) {
          next_page = page_of(p.tokens, tile.queries.request, choice.blocks[1]);
        }
      }
    }
  }
}

// A warp: lists the blocks that the rows of each tile chose.
__device__ void choose(PagedPrefillParams const& p, PrefillShared& shared, int tile_tokens) {
  if (p.joined.flags != nullptr) wait_for_previous_kernel();
  TileWalk<true> walk(p, tile_tokens);
  Ring queries;
  HeadTile tile = walk.next();
  wait_for_previous_kernel();
  for (; tile.queries.num_tokens > 0; tile = walk.next(), queries.next()) {
    int const s = queries.stage;
    sm90::barrier_wait(shared_address(&shared.q_empty[s]), queries.parity ^ 1);
    int32_t const last = count_pages<true>(p, tile) - 1;
    if (last >= kMaxJoined) {
      choose_far(p, tile, last, shared.ids, shared.choice[s]);
    } else if (last >= 0) {
      choose_near(p, tile, last, shared.choice[s]);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) sm90::barrier_arrive(shared_address(&shared.choice_full[s]));
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
// by `decay`. Rows that do not see the page get weights of 0.
__device__ bool weigh(State& state, float (&s)[64], float (&decay)[2], Scale scale,
                      bool const (&sees)[2]) {
  bool exceeds;
  if (state.positive) {
    int const largest[2] = {largest_bits(s, 0), largest_bits(s, 1)};
    exceeds = (sees[0] & (largest[0] > __float_as_int(state.bound[0]))) |
              (sees[1] & (largest[1] > __float_as_int(state.bound[1])));
  } else {
    float const largest[2] = {largest_score(s, 0), largest_score(s, 1)};
    exceeds = (sees[0] & (largest[0] > state.bound[0])) | (sees[1] & (largest[1] > state.bound[1]));
  }
  bool const shrinks = __any_sync(~0u, exceeds);
  if (shrinks) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {  // a row never depends on the warp's others
      float const largest = row_max(largest_score(s, h));
      decay[h] = 1.f;
      if (sees[h] && largest > state.bound[h]) {
        float const base = -largest * scale.log2;
        decay[h] = state.bound[h] == -INFINITY ? 0.f : exp2_flushed(base - state.base[h]);
        state.base[h] = base;
        state.bound[h] = largest + scale.slack;
        state.sum[h] *= decay[h];
      }
    }
    state.positive = __all_sync(~0u, state.bound[0] >= 0.f && state.bound[1] >= 0.f);
  }
  float const base[2] = {sees[0] ? state.base[0] : -INFINITY, sees[1] ? state.base[1] : -INFINITY};
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    int const h = i / 2 % 2;
    s[i] = exp2_flushed(fmaf(s[i], scale.log2, base[h]));
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
template <bool kSelects>
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
  Choice const& choice = shared.choice[self.queries.stage];
  int const pages = kSelects ? choice.count : count;
  auto const chose = [&](int h, int i) {
    int const token = (row + 8 * h) >> log_group;
    return (choice.tokens[i][token / 32] >> token % 32 & 1) != 0;
  };
  struct Page {
    int32_t id;
    int block, place;
    bool is_partial;  // not all rows chose it
  };
  auto const weigh_page = [&](Page const& page) {
    int const t = page.block;
    if (page.id < 0 || tile.first_position + 1 < (t + 1) * KEYS) {
      int limit[2];
      for (int h = 0; h < 2; ++h) limit[h] = page.id < 0 ? 0 : position[h] + 1 - t * KEYS;
      mask(s, limit);
    }
    bool sees[2] = {true, true};
    if (page.is_partial) sees[0] = chose(0, page.place), sees[1] = chose(1, page.place);
    return weigh(state, s, decay, scale, sees);
  };
  auto const wait_keys = [&](int i) -> Page {
    sm90::barrier_wait(shared_address(&shared.k_full[self.keys.stage]), self.keys.parity);
    int32_t const id = shared.page[self.keys.stage];
    if constexpr (kSelects) return {id, choice.blocks[i], i, (choice.whole >> i & 1) == 0};
    return {id, count - 1 - i, i, false};
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

  Page page = wait_keys(0);
  sm90::sync_threads(kGroup + self.index, WARPGROUP);  // all have read the page's number
  start_scores();
  sm90::wait<0>();
  sm90::pin(s);
  free_keys();
  weigh_page(page);
  pack(weights, s);
  if (int const visible = tile.length() - (count - 1) * KEYS; visible < KEYS) {
    wait_values();
    clear_values(shared, self.values.stage, visible, self.index);
  }
  for (int i = 1; i < pages; ++i) {
    page = wait_keys(i);
    sm90::sync_threads(kTurn + self.index, 2 * WARPGROUP);
    start_scores();
    wait_values();
    start_sum();
    sm90::arrive_threads(kTurn + 1 - self.index, 2 * WARPGROUP);
    sm90::wait<1>();
    sm90::pin(s);
    free_keys();
    bool const shrinks = weigh_page(page);
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
__device__ void store_rows(PagedPrefillParams const& p, PrefillShared& shared, HeadTile const& tile,
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
    if (row < tile.queries.num_tokens << log_group) {
      to[head * (kHeadSize / 8) + chunk] = pieces[i];
    }
  }
}

template <bool kSelects>
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
    HeadTile const tile = shared.tile[stage];
    if (tile.queries.num_tokens == 0) break;
    State state;
    float out[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) out[i] = 0.f;
    if (int const count = count_pages<kSelects>(p, tile); count > 0) {
      if constexpr (kSelects) {
        sm90::barrier_wait(shared_address(&shared.choice_full[stage]), self.queries.parity);
      }
      attend<kSelects>(shared, tile.queries, count, log_group, scale, self, state, out);
    }
    store_rows(p, shared, tile, log_group, self, state, out);
  }
}

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// Grid: a block for each multiprocessor.
template <bool kSelects>
__global__ void __launch_bounds__(THREADS, 1)
    prefill_kernel(__grid_constant__ PagedPrefillParams const p,
                   __grid_constant__ CUtensorMap const q_map,
                   __grid_constant__ CUtensorMap const kv_map, int tile_tokens) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  auto& shared = *reinterpret_cast<PrefillShared*>(memory);
  let_next_kernel_start();
  int const group = p.num_heads / p.num_kv_heads;
  if (threadIdx.x == 0) {
    ptx::prefetch_map(&q_map);
    ptx::prefetch_map(&kv_map);
    for (int s = 0; s < STAGES; ++s) {
      sm90::barrier_init(shared_address(&shared.choice_full[s]), 1);
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
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;\n");
    if (threadIdx.x < 32) {
      produce<kSelects>(p, q_map, kv_map, shared, group, tile_tokens);
    } else if (kSelects && threadIdx.x / 32 == 1) {
      choose(p, shared, tile_tokens);
    } else if (threadIdx.x >= 64) {
      wait_for_previous_kernel();
      clear_context_padding(p, threadIdx.x - 64, WARPGROUP - 64);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;\n");
    wait_for_previous_kernel();
    consume<kSelects>(p, shared, group);
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
  auto* const kernel = p.block_ids == nullptr ? prefill_kernel<false> : prefill_kernel<true>;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                sizeof(PrefillShared));
  if (status != cudaSuccess) return status;
  int processors = 0;
  status = count_processors(processors);
  if (status != cudaSuccess) return status;
  auto const tokens = static_cast<int>(tile_tokens);
  int const blocks = std::min(prefill_slots(p, tokens) * p.num_kv_heads, processors);
  return launch_behind(kernel, blocks, THREADS, sizeof(PrefillShared), stream, p, q_map, kv_map,
                       tokens);
}

}  // namespace m3::kernels
