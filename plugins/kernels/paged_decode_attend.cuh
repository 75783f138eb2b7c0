#pragma once

#include "kernels/global_memory.cuh"
#include "kernels/paged_decode_loader.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/vectors.cuh"

// Attention of the segments of a schedule: the body that all decode kernels share.
namespace m3::kernels::paged_decode {

// Weight of a result whose maximum was `maximum` under a larger one.
__device__ inline float share(float maximum, float largest) {
  return largest == -INFINITY ? 0.f : exp2_flushed(maximum - largest);
}

// Four channels of a row of the output.
__device__ inline void write_row(PagedDecodeParams const& p, int64_t query, int channel, float4 sum,
                                 float total) {
  float const scale = p.kv_scale == nullptr ? 1.f : *p.kv_scale;
  float const factor = total == 0.f ? 0.f : __fdividef(scale, total);
  store4(static_cast<Bf16*>(p.out) + query * kHeadSize + channel, sum * factor);
}

// Starts an item's query rows on their way.
template <int kRowWarps, class Schedule>
__device__ void copy_queries(PagedDecodeParams const& p, Schedule const& at, int group,
                             DecodeShared<kRowWarps>& shared) {
  uint32_t const to = shared_address(shared.queries);
#pragma unroll
  for (int i = 0; i < kRowWarps; ++i) {
    int const row = i * 16 + threadIdx.x / 16, chunk = threadIdx.x % 16;
    int64_t const query = at.query(row, group);
    auto const* const from =
        static_cast<Bf16 const*>(p.q) + max(query, int64_t{0}) * kHeadSize + chunk * 8;
    copy_async(to + swizzled<16>(row, chunk), from, query >= 0);
  }
}

// Adds up what the teams have of a segment and calls emit(row, channel, maximum, total, sum) for
// four channels each. Before the memory is used again the caller waits for all threads.
template <class Cache, int kRowWarps, class Emit>
__device__ void merge_teams(DecodeShared<kRowWarps>& shared, uint8_t* memory, int stage,
                            State const& state, Emit const& emit) {
  constexpr int TEAMS = Shape<Cache, kRowWarps>::TEAMS;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Team const team(kRowWarps);
  auto* const own = reinterpret_cast<float*>(memory + stage * STAGE_BYTES + warp * WARP_BYTES);
  shared.last_stage[team.index] = stage;
  team_sync<kRowWarps>(team);  // every warp of the team has read the stage
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int const local = 8 * h + lane / 4;
    float const sum = row_sum(state.sum[h]);
    if (lane % 4 == 0) {
      shared.maxima[team.index][team.row_warp * 16 + local] = state.maximum[h];
      shared.sums[team.index][team.row_warp * 16 + local] = sum;
    }
#pragma unroll
    for (int n = 0; n < kHeadSize / 16; ++n) {
      Products<Cache>::store(own + local * kHeadSize, local % 8 * 8, n, h, state.out);
    }
  }
  __syncthreads();
  int const local = threadIdx.x / 16, channel = threadIdx.x % 16 * 4;
#pragma unroll 1
  for (int part = 0; part < kRowWarps; ++part) {
    int const row = part * 16 + local;
    float maximum = -INFINITY, total = 0.f;
#pragma unroll
    for (int t = 0; t < TEAMS; ++t) maximum = fmaxf(maximum, shared.maxima[t][row]);
    float4 sum[2] = {};
#pragma unroll
    for (int t = 0; t < TEAMS; ++t) {
      float const factor = share(shared.maxima[t][row], maximum);
      total += shared.sums[t][row] * factor;
      auto const* const from =
          reinterpret_cast<float const*>(memory + shared.last_stage[t] * STAGE_BYTES +
                                         (t * kRowWarps + part) * WARP_BYTES) +
          local * kHeadSize;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        axpy4(sum[i], load4(from + ((channel + 64 * i) ^ (local % 8 * 8))), factor);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) emit(row, channel + 64 * i, maximum, total, sum[i]);
  }
}

// All segments of a schedule, which has been read: each team streams its slices through its stages
// and its own softmax; only the beginning and the end of a segment bring the block together.
template <class Cache, int kRowWarps, bool kSelected, bool kBulk, class Schedule, class Finish>
__device__ void attend_segments(PagedDecodeParams const& p, BulkMaps const& maps, int group,
                                Schedule at, int rank, int blocks, uint8_t* memory, int stages,
                                Finish& finish) {
  using S = Shape<Cache, kRowWarps>;
  using P = Products<Cache>;
  auto& shared = *reinterpret_cast<DecodeShared<kRowWarps>*>(memory + stages * STAGE_BYTES);
  Team const team(kRowWarps);
  copy_queries(p, at, group, shared);
  Loader<Cache, kRowWarps, kSelected, kBulk, Schedule> loader(p, maps, at, rank, blocks,
                                                              shared_address(memory), shared);
  int32_t token[2];  // of the item, to which the lane's rows belong
  for (int h = 0; h < 2; ++h) {
    token[h] = at.token_of(team.row_warp * 16 + 8 * h + threadIdx.x % 32 / 4, group);
  }
  constexpr float kLog2E = 1.44269504088896341f;
  float const scale_log2 = p.softmax_scale * kLog2E * (p.kv_scale == nullptr ? 1.f : *p.kv_scale);
  uint32_t const ring = shared_address(memory) + team.index * kRowWarps * WARP_BYTES;
  uint32_t const queries = shared_address(shared.queries) + team.row_warp * 16 * kHeadSize * 2;
  Queries q;
  State state;
  state.clear();
  bool is_first = true;  // slice of a segment
  int stage = 0;
  unsigned parities = 0;
  for (int filled = 0;;) {
    loader.load(stage);
    commit_copies();
    stage = stage + 1 == stages ? 0 : stage + 1;
    if (filled < stages && ++filled < stages) continue;
    if (is_first) {
      wait_copies<0>();
      __syncthreads();
      P::load(q, queries);
      is_first = false;
    }
    if (!kBulk) {
      wait_for_oldest(stages);
      team_sync<kRowWarps>(team);
    }
    int32_t const slice = shared.slices[threadIdx.x / 32][stage];
    int32_t const visible = slice & (LAST_SLICE - 1);
    uint32_t const keys = ring + stage * STAGE_BYTES;
    if (kBulk && visible > 0) {
      wait_bulk(shared_address(&shared.arrived[team.index][stage]), parities >> stage & 1);
      parities ^= 1u << stage;
      if (visible < S::KEYS) {  // what lies behind may be NaN
        constexpr int CHUNKS = P::CHUNKS;
        for (int i = visible * CHUNKS + team.thread; i < S::KEYS * CHUNKS; i += S::TEAM_THREADS) {
          uint32_t const to = S::SLICE_BYTES + key_chunk(S::KEYS, i / CHUNKS, i % CHUNKS);
          store_zeros(keys + to);
        }
        fence_bulk();
        team_sync<kRowWarps>(team);
      }
    }
#pragma unroll 1
    for (int first = 0; first < min(visible, S::KEYS); first += P::KEYS) {
      int32_t const last_token = visible - first - (at.num_tokens() - 1);
      int32_t const limit[2] = {last_token + token[0], last_token + token[1]};
      uint32_t const from = keys + first * 128;
      attend<Cache>(state, q, scale_log2, from, from + S::SLICE_BYTES, S::KEYS, limit);
    }
    if ((slice & LAST_SLICE) != 0) {
      finish.template end<Cache>(at, shared, memory, stage, state);
      at.next();
      if (at.done()) break;
      copy_queries(p, at, group, shared);
      state.clear();
      is_first = true;
    }
    team_sync<kRowWarps>(team);  // the stage is free
  }
}

// What the copy engine needs; a barrier of the block.
template <int kRowWarps>
__device__ void init_stages(DecodeShared<kRowWarps>& shared, BulkMaps const& maps) {
  constexpr int COUNT = DecodeShared<kRowWarps>::TEAMS * MAX_STAGES;
  if (threadIdx.x < COUNT) {
    init_bulk_barrier(shared_address(&shared.arrived[0][0] + threadIdx.x));
  } else if (threadIdx.x == THREADS - 1) {
    prefetch_map(&maps.keys);
    prefetch_map(&maps.values);
  }
  __syncthreads();
}

// A selection's pages may lie anywhere in the row of the table.
__device__ inline void prefetch_table(PagedDecodeParams const& p, int32_t request, int32_t length) {
  int32_t const* const row = p.tokens.block_offsets + int64_t{request} * p.tokens.max_pages;
  int32_t const end = min(p.tokens.max_pages, (length + kBlockSize - 1) / kBlockSize);
  for (int32_t i = threadIdx.x * 32; i < end; i += THREADS * 32) prefetch(row + i);
}

template <class Kernel>
cudaError_t allow_shared(Kernel* kernel, size_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
}

}  // namespace m3::kernels::paged_decode
