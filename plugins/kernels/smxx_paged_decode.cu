#include <algorithm>

#include "kernels/cluster.cuh"
#include "kernels/paged_decode_loader.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/tensor_map.h"
#include "kernels/vectors.cuh"

namespace m3::kernels {
namespace {

using namespace paged_decode;

constexpr int MERGE_ROWS = 4;    // of a merge block
constexpr int MERGE_WARPS = 2;   // of a row
constexpr int MAX_BLOCKS = 192;  // one a multiprocessor

// What a block leaves of an item that it does not finish alone.
struct Split {
  int32_t first_token, num_tokens, head;  // num_tokens 0: the block begins no such item
  int32_t last_block;
};

struct Workspace {
  float* out;      // [blocks, 2, rows, D] sums of weights and values
  float2* totals;  // [blocks, 2, rows] maximum (of the base-2 exponent) and sum of the weights
  Split* splits;   // [blocks]

  // Piece 0 began in an earlier block, piece 1 begins here.
  __device__ int64_t row(int32_t block, int piece, int rows, int r) const {
    return (int64_t{block} * 2 + piece) * rows + r;
  }
};

Workspace carve(void* memory, int rows) {
  auto* const out = static_cast<float*>(memory);
  auto* const totals = reinterpret_cast<float2*>(out + int64_t{MAX_BLOCKS} * 2 * rows * kHeadSize);
  return {out, totals, reinterpret_cast<Split*>(totals + int64_t{MAX_BLOCKS} * 2 * rows)};
}

// Where the blocks of a cluster leave their results of an item for each other: each row for the
// block that writes it. Twice, so that a block can leave the next item's while others read.
constexpr int MAX_SLOTS = 20;  // blocks times rows of each, see CLUSTERS
struct alignas(128) Exchange {
  float out[2][MAX_SLOTS][kHeadSize];  // [block, row of the receiver]
  float2 totals[2][MAX_SLOTS];         // maximum and sum of the weights
  uint64_t arrived[2];
};

// Weight of a result whose maximum was `maximum` under a larger one.
__device__ float share(float maximum, float largest) {
  return largest == -INFINITY ? 0.f : exp2_flushed(maximum - largest);
}

// Four channels of a row of the output.
__device__ void write_row(PagedDecodeParams const& p, int64_t query, int channel, float4 sum,
                          float total, bool rehearses = false) {
  float const scale = p.kv_scale == nullptr ? 1.f : *p.kv_scale;
  float const factor = total == 0.f ? 0.f : __fdividef(scale, total);
  sum = sum * factor;
  if (!rehearses) store4(static_cast<Bf16*>(p.out) + query * kHeadSize + channel, sum);
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
                            State const& state, bool rehearses, Emit const& emit) {
  constexpr int TEAMS = Shape<Cache, kRowWarps>::TEAMS;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Team const team(kRowWarps);
  auto* const own =
      rehearses ? shared.rehearsal
                : reinterpret_cast<float*>(memory + stage * STAGE_BYTES + warp * WARP_BYTES);
  int const row_size = rehearses ? 0 : kHeadSize;
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
      Products<Cache>::store(own + local * row_size, local % 8 * 8, n, h, state.out);
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
      auto const* const team_rows = reinterpret_cast<float const*>(
          memory + shared.last_stage[t] * STAGE_BYTES + (t * kRowWarps + part) * WARP_BYTES);
      auto const* const from = (rehearses ? shared.rehearsal : team_rows) + local * row_size;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        axpy4(sum[i], load4(from + ((channel + 64 * i) ^ (local % 8 * 8))), factor);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) emit(row, channel + 64 * i, maximum, total, sum[i]);
  }
}

// Ends the items of a block that takes them whole.
struct OwnItems {
  PagedDecodeParams const& p;
  int group;

  template <class Cache>
  __device__ void end(ItemRounds const& at, DecodeShared<1>& shared, uint8_t* memory, int stage,
                      State const& state, bool rehearses) {
    merge_teams<Cache, 1>(shared, memory, stage, state, rehearses,
                          [&](int row, int channel, float, float total, float4 sum) {
                            if (row >= group) return;
                            write_row(p, at.query(row, group), channel, sum, total, rehearses);
                          });
    fence_bulk();
    __syncthreads();
  }
};

// Ends the items of a cluster, whose block `rank` of `blocks` joins and writes some of the rows.
struct JoinedItems {
  PagedDecodeParams const& p;
  int group;
  Exchange& exchange;
  int rank, blocks, rows;  // of each block
  int round = 0;

  template <class Cache>
  __device__ void end(ItemRounds const& at, DecodeShared<1>& shared, uint8_t* memory, int stage,
                      State const& state, bool rehearses) {
    int const buffer = round % 2;
    auto const& totals = exchange.totals[buffer];
    uint64_t* const arrived = &exchange.arrived[buffer];
    int const own_rows = max(0, min(rows, group - rank * rows));
    if (threadIdx.x == 0 && !rehearses) {
      expect_exchange(arrived, blocks * own_rows * (kHeadSize * sizeof(float) + sizeof(float2)));
    }
    if (round == 0 && !rehearses) cluster_wait();  // all blocks have started
    merge_teams<Cache, 1>(shared, memory, stage, state, rehearses,
                          [&](int row, int channel, float maximum, float total, float4 sum) {
                            if (row >= group) return;
                            int const owner = row / rows, slot = rank * rows + row - owner * rows;
                            auto* const to =
                                reinterpret_cast<float4*>(&exchange.out[buffer][slot][channel]);
                            if (!rehearses) store_remote(to, arrived, owner, sum);
                            if (channel == 0 && !rehearses) {
                              store_remote(&exchange.totals[buffer][slot], arrived, owner,
                                           make_float2(maximum, total));
                            }
                          });
    if (!rehearses) {
      wait_exchange(arrived, round / 2 % 2);
      ++round;
    }
    for (int i = threadIdx.x; i < own_rows * (kHeadSize / 4); i += THREADS) {
      int const row = i / (kHeadSize / 4), channel = i % (kHeadSize / 4) * 4;
      float maximum = -INFINITY, total = 0.f;
#pragma unroll 4
      for (int b = 0; b < blocks; ++b) maximum = fmaxf(maximum, totals[b * rows + row].x);
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
      for (int b = 0; b < blocks; ++b) {
        int const slot = b * rows + row;
        float const factor = share(totals[slot].x, maximum);
        total += totals[slot].y * factor;
        axpy4(sum, load4(&exchange.out[buffer][slot][channel]), factor);
      }
      write_row(p, at.query(rank * rows + row, group), channel, sum, total, rehearses);
    }
    fence_bulk();
    __syncthreads();
  }
};

// Ends the segments of a block's equal share: writes whole items, leaves pieces in the workspace.
template <int kRowWarps>
struct SharedItems {
  PagedDecodeParams const& p;
  int group;
  Workspace const& workspace;
  DecodeShares const& shares;
  int32_t page;  // of the step, the segment's first
  Split split{};

  template <class Cache>
  __device__ void end(DecodeCursor const& at, DecodeShared<kRowWarps>& shared, uint8_t* memory,
                      int stage, State const& state, bool) {
    DecodeItem const& item = at.item();
    bool const ends_here = at.end() == item.num_pages;
    int const piece = at.first() > 0 ? 0 : ends_here ? -1 : 1;
    merge_teams<Cache, kRowWarps>(
        shared, memory, stage, state, false,
        [&](int row, int channel, float maximum, float total, float4 sum) {
          int64_t const query = at.query(row, group);
          if (query < 0) return;
          if (piece < 0) {
            write_row(p, query, channel, sum, total);
          } else {
            int64_t const index = workspace.row(blockIdx.x, piece, 16 * kRowWarps, row);
            if (channel == 0) workspace.totals[index] = make_float2(maximum, total);
            store4(workspace.out + index * kHeadSize + channel, sum);
          }
        });
    if (piece == 1) {
      int32_t const last_page = page - at.first() + item.num_pages - 1;
      split = {item.first_token, item.num_tokens, item.head, shares.block_of(last_page)};
    }
    page += at.end() - at.first();
    fence_bulk();
    __syncthreads();
  }
};

// All segments of a schedule, which has been read: each team streams its slices through its stages
// and its own softmax; only the beginning and the end of a segment bring the block together. A
// rehearsal on whatever lies in shared memory fetches the code, which else comes from L2, line by
// line, when the data is there: `early`, before the kernel in front has ended, or while the first
// slices are coming.
template <class Cache, int kRowWarps, bool kSelected, bool kBulk, class Schedule, class Finish>
__device__ void attend_segments(PagedDecodeParams const& p, BulkMaps const& maps, int group,
                                Schedule at, int rank, int blocks, uint8_t* memory, int stages,
                                bool rehearses, bool early, Finish& finish) {
  using S = Shape<Cache, kRowWarps>;
  using P = Products<Cache>;
  auto& shared = *reinterpret_cast<DecodeShared<kRowWarps>*>(memory + stages * STAGE_BYTES);
  Team const team(kRowWarps);
  Loader<Cache, kRowWarps, kSelected, kBulk, Schedule> loader(p, maps, at, rank, blocks,
                                                              shared_address(memory), shared);
  int32_t token[2];  // of the item, to which the lane's rows belong
  for (int h = 0; h < 2; ++h) {
    token[h] = at.token_of(team.row_warp * 16 + 8 * h + threadIdx.x % 32 / 4, group);
  }
  constexpr float kLog2E = 1.44269504088896341f;
  float scale_log2 = p.softmax_scale * kLog2E;
  uint32_t const ring = shared_address(memory) + team.index * kRowWarps * WARP_BYTES;
  uint32_t const queries = shared_address(shared.queries) + team.row_warp * 16 * kHeadSize * 2;
  Queries q;
  State state;
  state.clear();
  bool is_first = true;  // slice of a segment
  int stage = 0, filled = 0;
  unsigned parities = 0;
  // So far only inputs of the step were used, from here on results of its kernels.
  auto const begin = [&] {
    wait_for_previous_kernel();
    loader.begin(at);
    copy_queries(p, at, group, shared);
    if (p.kv_scale != nullptr) scale_log2 *= *p.kv_scale;
  };
  bool loads = true;
  if (!early) begin();
  for (;;) {
    if (loads) {
      loader.load(stage);
      commit_copies();
    }
    if (loads && !(early && rehearses)) {
      stage = stage + 1 == stages ? 0 : stage + 1;
      if (filled < stages && ++filled < stages) continue;
    }
    loads = true;
    if (is_first) {
      wait_copies<0>();
      __syncthreads();
      P::load(q, queries);
      is_first = false;
    }
    if (!kBulk && !rehearses) {
      wait_for_oldest(stages);
      team_sync<kRowWarps>(team);
    }
    int32_t const slice = rehearses ? S::KEYS | LAST_SLICE : shared.slices[threadIdx.x / 32][stage];
    int32_t const visible = slice & (LAST_SLICE - 1);
    uint32_t const keys = ring + stage * STAGE_BYTES;
    if (kBulk && visible > 0 && !rehearses) {
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
      finish.template end<Cache>(at, shared, memory, stage, state, rehearses);
      state.clear();
      if (rehearses) {
        rehearses = false;
        is_first = early;
        if (early) begin();
        loads = early;
        continue;
      }
      is_first = true;
      at.next();
      if (at.done()) break;
      copy_queries(p, at, group, shared);
    }
    team_sync<kRowWarps>(team);  // the stage is free
  }
}

// Tokens behind the real ones, among those of the decode rows.
__device__ void clear_padding(PagedDecodeParams const& p) {
  int32_t const first = max(p.tokens.cu_query_lens[p.tokens.num_requests],
                            p.tokens.num_tokens - p.num_decode * p.q_len);
  int64_t const per_token = int64_t{p.num_heads} * kHeadSize / 8;  // 16 bytes each
  auto* const out = static_cast<uint4*>(p.out);
  for (int64_t i = first * per_token + int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       i < p.tokens.num_tokens * per_token; i += int64_t{gridDim.x} * blockDim.x) {
    out[i] = make_uint4(0, 0, 0, 0);
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

__device__ void prefetch(void const* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// A selection's pages may lie anywhere in the row of the table. One warp's work: the others need
// not wait for the length.
__device__ void prefetch_table(PagedDecodeParams const& p, int32_t request, int32_t length) {
  int32_t const* const row = p.tokens.block_offsets + int64_t{request} * p.tokens.max_pages;
  int32_t const end = min(p.tokens.max_pages, (length + kBlockSize - 1) / kBlockSize);
  for (int32_t i = threadIdx.x % 32 * 32; i < end; i += 32 * 32) prefetch(row + i);
}

// Selections, an item a cluster. Grid: clusters in rounds over the items.
template <class Cache, bool kJoins>
__global__ void __launch_bounds__(THREADS, 1)
    selected_decode_kernel(__grid_constant__ PagedDecodeParams const p,
                           __grid_constant__ BulkMaps const maps, int group, int stages,
                           bool early) {
  extern __shared__ __align__(1024) uint8_t memory[];
  let_next_kernel_start();
  init_stages(*reinterpret_cast<DecodeShared<1>*>(memory + stages * STAGE_BYTES), maps);
  int const blocks = kJoins ? cluster_size() : 1, rank = kJoins ? cluster_rank() : 0;
  auto& exchange =
      *reinterpret_cast<Exchange*>(memory + stages * STAGE_BYTES + sizeof(DecodeShared<1>));
  if constexpr (kJoins) {
    if (threadIdx.x == 0) {
      init_exchange(&exchange.arrived[0]);
      init_exchange(&exchange.arrived[1]);
    }
    __syncwarp();
    cluster_arrive();
  }
  ItemRounds at(p, static_cast<int32_t>(blockIdx.x) / blocks,
                static_cast<int32_t>(gridDim.x) / blocks);
  at.read();
  // What the kernel before has yet to write may be on its way to L2 already.
  int64_t const ids = int64_t{at.head()} * p.tokens.num_tokens + at.first_token();
  if (threadIdx.x < group * kHeadSize * sizeof(Bf16) / 128) {
    prefetch(static_cast<uint8_t const*>(p.q) + at.query(0, group) * kHeadSize * sizeof(Bf16) +
             threadIdx.x * 128);
  } else if (threadIdx.x >= THREADS - 2) {
    prefetch(p.block_ids + ids * p.top_k + (threadIdx.x == THREADS - 1 ? p.top_k - 1 : 0));
  }
  if (threadIdx.x < 32) {
    ItemRounds ahead = at;
    ahead.resolve();
    prefetch_table(p, ahead.request(), ahead.length());
  }
  if constexpr (kJoins) {
    JoinedItems finish{p, group, exchange, rank, blocks, (kMaxGroup + blocks - 1) / blocks};
    attend_segments<Cache, 1, true, true>(p, maps, group, at, rank, blocks, memory, stages, true,
                                          early, finish);
  } else {
    OwnItems finish{p, group};
    attend_segments<Cache, 1, true, true>(p, maps, group, at, rank, blocks, memory, stages, true,
                                          false, finish);
  }
}

// Grid: as many blocks as the GPU runs at once.
template <class Cache, int kRowWarps, bool kSelected, bool kBulk>
__global__ void __launch_bounds__(THREADS, 1)
    decode_kernel(__grid_constant__ PagedDecodeParams const p,
                  __grid_constant__ BulkMaps const maps, int group, int group_tokens,
                  Workspace const workspace) {
  extern __shared__ __align__(1024) uint8_t memory[];
  let_next_kernel_start();
  if (kBulk) {
    init_stages(*reinterpret_cast<DecodeShared<kRowWarps>*>(memory + MAX_STAGES * STAGE_BYTES),
                maps);
  }
  int32_t const block = blockIdx.x;
  DecodeCursor cursor(p, group_tokens);
  DecodeShares const shares(cursor.count_pages(), gridDim.x);
  int32_t const begin = shares.begin(block);
  int32_t const count = shares.begin(block + 1) - begin;
  if (count == 0) {
    wait_for_previous_kernel();
    if (threadIdx.x == 0) workspace.splits[block] = {};
    clear_padding(p);
    return;
  }
  cursor.seek(begin, count);
  if (kSelected && threadIdx.x < 32) prefetch_table(p, cursor.request(), cursor.length());
  SharedItems<kRowWarps> finish{p, group, workspace, shares, begin};
  attend_segments<Cache, kRowWarps, kSelected, kBulk>(p, maps, group, cursor, 0, 1, memory,
                                                      MAX_STAGES, false, false, finish);
  if (threadIdx.x == 0) workspace.splits[block] = finish.split;
  clear_padding(p);
}

// Joins the pieces of the item that decode block blockIdx.x began, in the order of the blocks.
__global__ void __launch_bounds__(32 * MERGE_WARPS * MERGE_ROWS)
    merge_kernel(__grid_constant__ PagedDecodeParams const p, int rows, Workspace const workspace) {
  __shared__ float4 sums[MERGE_ROWS][32];
  __shared__ float totals[MERGE_ROWS];
  let_next_kernel_start();
  wait_for_previous_kernel();
  int const lane = threadIdx.x % 32, local_row = threadIdx.x / 32 / MERGE_WARPS;
  int const part = threadIdx.x / 32 % MERGE_WARPS;
  int32_t const first = blockIdx.x;
  int const row = blockIdx.y * MERGE_ROWS + local_row;
  Split const split = workspace.splits[first];
  if (split.num_tokens == 0) return;
  int const group = p.num_heads / p.num_kv_heads;
  bool const valid = row < split.num_tokens * group;

  int const count = valid ? split.last_block - first + 1 : 0;
  auto const at = [&](int i) { return workspace.row(first + i, i == 0 ? 1 : 0, rows, row); };
  float maximum = -INFINITY;
  for (int i = lane; i < count; i += 32) maximum = fmaxf(maximum, workspace.totals[at(i)].x);
  maximum = warp_max(maximum);
  float const base = maximum == -INFINITY ? 0.f : maximum;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  float total = 0.f;
  constexpr int DEPTH = 8;  // pieces on their way at once
  for (int i = part; i < count; i += DEPTH * MERGE_WARPS) {
    float2 piece[DEPTH];
    float4 out[DEPTH];
#pragma unroll
    for (int j = 0; j < DEPTH; ++j) {
      int const k = i + j * MERGE_WARPS;
      piece[j] = k < count ? workspace.totals[at(k)] : make_float2(-INFINITY, 0.f);
      out[j] = k < count ? load4(workspace.out + at(k) * kHeadSize + 4 * lane) : float4{};
    }
#pragma unroll
    for (int j = 0; j < DEPTH; ++j) {
      float const factor = exp2_flushed(piece[j].x - base);
      total += piece[j].y * factor;
      axpy4(sum, out[j], factor);
    }
  }
  static_assert(MERGE_WARPS == 2, "the second warp of a row hands its half to the first");
  if (part == 1) {
    sums[local_row][lane] = sum;
    totals[local_row] = total;
  }
  __syncthreads();
  if (part == 1 || !valid) return;
  axpy4(sum, sums[local_row][lane], 1.f);
  total += totals[local_row];
  int64_t const query =
      int64_t{split.first_token + row / group} * p.num_heads + split.head * group + row % group;
  write_row(p, query, 4 * lane, sum, total);
}

// Warps of 16 query rows that an item gets, and the tokens that fit into them. A selection belongs
// to one token, so its items have one.
struct Tiling {
  int row_warps, tokens;
};
Tiling tiling_of(int32_t num_heads, int32_t num_kv_heads, int32_t q_len, bool has_block_ids) {
  int const group = num_heads / num_kv_heads;
  int const wanted = has_block_ids ? group : group * q_len;
  int const row_warps = wanted <= 16 ? 1 : wanted <= 32 ? 2 : 4;
  return {row_warps, has_block_ids ? 1 : std::max(1, std::min(q_len, 16 * row_warps / group))};
}

struct Device {
  int processors, major;
};
cudaError_t current(Device& device) {
  int id = 0;
  cudaError_t status = cudaGetDevice(&id);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&device.processors, cudaDevAttrMultiProcessorCount, id);
  if (status != cudaSuccess) return status;
  return cudaDeviceGetAttribute(&device.major, cudaDevAttrComputeCapabilityMajor, id);
}

template <class Kernel>
cudaError_t allow_shared(Kernel* kernel, size_t bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(bytes));
}

// The view for the copy engine, which takes slices of `keys`.
cudaError_t encode_view(BulkMaps& maps, DecodeView const& view, int keys) {
  cuuint64_t const bytes = view.type == Type::kFloat8E4m3 ? 1 : 2;
  // Any id: the page table says which exist.
  cuuint64_t const dims[] = {static_cast<cuuint64_t>(view.token_stride), kBlockSize, INT32_MAX};
  cuuint64_t const strides[] = {view.token_stride * bytes, view.page_stride * bytes};
  cuuint32_t const box[] = {static_cast<cuuint32_t>(128 / bytes), static_cast<cuuint32_t>(keys), 1};
  auto const type = bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  // Fetching more than a row of the box would fetch another head's keys.
  auto const promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  cudaError_t const status =
      encode_tensor_map(maps.keys, view.keys, type, 3, dims, strides, box, promotion);
  if (status != cudaSuccess) return status;
  return encode_tensor_map(maps.values, view.values, type, 3, dims, strides, box, promotion);
}

template <class Cache, int kRowWarps, bool kSelected, bool kBulk>
cudaError_t launch_shares(PagedDecodeParams const& p, int group_tokens, Device const& device,
                          void* memory, cudaStream_t stream) {
  using S = Shape<Cache, kRowWarps>;
  constexpr size_t SHARED = MAX_STAGES * STAGE_BYTES + sizeof(DecodeShared<kRowWarps>);
  auto* const kernel = decode_kernel<Cache, kRowWarps, kSelected, kBulk>;
  cudaError_t status = allow_shared(kernel, SHARED);
  if (status != cudaSuccess) return status;
  BulkMaps maps{};
  if (kBulk) status = encode_view(maps, p.view, S::KEYS);
  if (status != cudaSuccess) return status;
  int const blocks = std::min(device.processors, MAX_BLOCKS);
  int const group = p.num_heads / p.num_kv_heads;
  Workspace const workspace = carve(memory, S::ROWS);
  // The merge runs under the same division of L1: changing it would empty the processors first.
  status = cudaFuncSetAttribute(merge_kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                cudaSharedmemCarveoutMaxShared);
  if (status != cudaSuccess) return status;
  status = launch_behind(kernel, dim3(blocks), dim3(THREADS), SHARED, stream, p, maps, group,
                         group_tokens, workspace);
  if (status != cudaSuccess) return status;
  return launch_behind(
      merge_kernel, dim3(blocks, static_cast<unsigned>(ceil_div(group * group_tokens, MERGE_ROWS))),
      dim3(32 * MERGE_WARPS * MERGE_ROWS), 0, stream, p, static_cast<int>(S::ROWS), workspace);
}

// How a selection's items are laid over the GPU.
struct Rounds {
  int cluster;   // blocks of an item
  int clusters;  // at once
};

// Sizes, and how many run at once on an H200: its processors come in groups of 10 to 18, which
// clusters do not cross.
constexpr int MEASURED_PROCESSORS = 132;
constexpr Rounds CLUSTERS[] = {{1, 132}, {2, 66}, {3, 39}, {4, 30},
                               {5, 22},  {6, 17}, {8, 15}, {16, 7}};

// The cluster with the shortest rounds, counted in eighths of a page: a block's share of an item,
// and the time that ending it takes.
Rounds rounds_of(int items, int top_k, int processors) {
  Rounds best{};
  int64_t best_cost = 0;
  for (Rounds const& size : CLUSTERS) {
    int const at_once = std::max(1, size.clusters * processors / MEASURED_PROCESSORS);
    int64_t const rounds = ceil_div(items, at_once);
    int64_t const cost = rounds * (ceil_div(8 * top_k, size.cluster) + (size.cluster > 1 ? 12 : 4));
    if (best.cluster == 0 || cost < best_cost) {
      best = {size.cluster, static_cast<int>(ceil_div(items, rounds))};
      best_cost = cost;
    }
  }
  return best;
}

template <class Cache, bool kJoins>
cudaError_t launch_rounds(PagedDecodeParams const& p, Device const& device, Rounds const& rounds,
                          int items, cudaStream_t stream) {
  auto* const kernel = selected_decode_kernel<Cache, kJoins>;
  // No more shared memory than a team's slices take.
  using S = Shape<Cache, 1>;
  int const slices = static_cast<int>(ceil_div(p.top_k * S::SLICES, rounds.cluster * S::TEAMS));
  int const stages = rounds.clusters == items ? std::min(MAX_STAGES, slices) : MAX_STAGES;
  size_t const shared =
      stages * STAGE_BYTES + sizeof(DecodeShared<1>) + (kJoins ? sizeof(Exchange) : 0);
  cudaError_t status = allow_shared(kernel, shared);
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (status != cudaSuccess) return status;
  BulkMaps maps;
  status = encode_view(maps, p.view, Shape<Cache, 1>::KEYS);
  if (status != cudaSuccess) return status;
  int const blocks = rounds.clusters * rounds.cluster;
  // With processors to spare the blocks start while the kernel in front still runs.
  bool const early = kJoins && rounds.clusters == items && 2 * blocks <= device.processors;
  return launch_clusters_behind(kernel, rounds.cluster, dim3(blocks), dim3(THREADS), shared, stream,
                                p, maps, p.num_heads / p.num_kv_heads, stages, early);
}

template <class Cache, bool kBulk>
cudaError_t launch_dense(PagedDecodeParams const& p, Device const& device, void* workspace,
                         cudaStream_t stream) {
  Tiling const tiling = tiling_of(p.num_heads, p.num_kv_heads, p.q_len, false);
  switch (tiling.row_warps) {
    case 1:
      return launch_shares<Cache, 1, false, kBulk>(p, tiling.tokens, device, workspace, stream);
    case 2:
      return launch_shares<Cache, 2, false, kBulk>(p, tiling.tokens, device, workspace, stream);
    default:
      return launch_shares<Cache, 4, false, kBulk>(p, tiling.tokens, device, workspace, stream);
  }
}

template <class Cache>
cudaError_t launch(PagedDecodeParams const& p, void* workspace, cudaStream_t stream) {
  Device device{};
  cudaError_t status = current(device);
  if (status != cudaSuccess) return status;
  cudaFuncAttributes compiled;
  status = cudaFuncGetAttributes(&compiled, selected_decode_kernel<Cache, true>);
  if (status != cudaSuccess) return status;
  bool const is_portable = device.major < 9 || compiled.ptxVersion < 90;
  if (p.block_ids == nullptr) {
    return is_portable ? launch_dense<Cache, false>(p, device, workspace, stream)
                       : launch_dense<Cache, true>(p, device, workspace, stream);
  }
  if (is_portable) return launch_shares<Cache, 1, true, false>(p, 1, device, workspace, stream);
  int const items = p.num_decode * p.q_len * p.num_kv_heads;
  Rounds const rounds = rounds_of(items, p.top_k, device.processors);
  return rounds.cluster == 1 ? launch_rounds<Cache, false>(p, device, rounds, items, stream)
                             : launch_rounds<Cache, true>(p, device, rounds, items, stream);
}

// The first key's address is that of its page's first byte, values lie half a page behind.
DecodeView view_of(void const* kv_cache, int32_t num_kv_heads, Type type) {
  int64_t const token = int64_t{num_kv_heads} * kHeadSize;
  int64_t const bytes = type == Type::kFloat8E4m3 ? 1 : 2;
  DecodeView view{};
  view.keys = kv_cache;
  view.values = static_cast<char const*>(kv_cache) + kBlockSize * token * bytes;
  view.token_stride = token;
  view.type = type;
  return view;
}

}  // namespace

DecodeView view_of_pages(void const* kv_cache, int32_t num_kv_heads, Type type) {
  DecodeView view = view_of(kv_cache, num_kv_heads, type);
  view.page_stride = 2 * kBlockSize * view.token_stride;
  view.head_stride = kHeadSize;
  view.ids_per_page = 1;
  return view;
}

DecodeView view_of_virtual_pages(void const* kv_cache, int32_t num_kv_heads, Type type) {
  DecodeView view = view_of(kv_cache, num_kv_heads, type);
  view.page_stride = kHeadSize;
  view.ids_per_page = 2 * kBlockSize * num_kv_heads;
  view.ids_per_head = 1;
  return view;
}

size_t paged_decode_workspace(int32_t num_heads, int32_t num_kv_heads, int32_t q_len,
                              bool has_block_ids) {
  int64_t const rows = 16 * tiling_of(num_heads, num_kv_heads, q_len, has_block_ids).row_warps;
  return MAX_BLOCKS * (2 * rows * (kHeadSize * sizeof(float) + sizeof(float2)) + sizeof(Split));
}

cudaError_t launch_paged_decode(PagedDecodeParams const& p, void* workspace, cudaStream_t stream) {
  if (p.num_decode == 0 || p.q_len == 0) return cudaSuccess;
  if (p.num_heads % p.num_kv_heads != 0 || p.num_heads > kMaxGroup * p.num_kv_heads ||
      p.q_len > kMaxDecodeLength || p.top_k > kMaxSelectedBlocks) {
    return cudaErrorInvalidValue;
  }
  switch (p.view.type) {
    case Type::kBfloat16:
      return launch<Bf16>(p, workspace, stream);
    case Type::kFloat8E4m3:
      return launch<E4m3>(p, workspace, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace m3::kernels
