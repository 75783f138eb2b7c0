#include <algorithm>

#include "kernels/cluster.cuh"
#include "kernels/paged_decode_loader.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/vectors.cuh"

namespace m3::kernels {
namespace {

using namespace paged_decode;

constexpr int MERGE_ROWS = 4;     // of a merge block
constexpr int MERGE_WARPS = 2;    // of a row
constexpr int MAX_BLOCKS = 192;   // one a multiprocessor
constexpr int MAX_CLUSTER = 16;

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

// Where the blocks of a cluster leave their results of an item for each other: each row for the block
// that writes it. Twice, so that one barrier an item is enough.
struct alignas(128) Exchange {
  float out[2][16][kHeadSize];  // [block, row of the receiver]
  float2 totals[2][16];
};

// Weight of a result whose maximum was `maximum` under a larger one.
__device__ float share(float maximum, float largest) {
  return largest == -INFINITY ? 0.f : exp2_flushed(maximum - largest);
}

// Four channels of a query row, from `channel` on.
__device__ void write_row(PagedDecodeParams const& p, int32_t first_token, int32_t head, int row,
                          int channel, float4 sum, float total) {
  int const group = p.num_heads / p.num_kv_heads;
  int64_t const at =
      int64_t{first_token + row / group} * p.num_heads + head * group + row % group;
  float const scale = p.kv_scale == nullptr ? 1.f : *p.kv_scale;
  store4(static_cast<Bf16*>(p.out) + at * kHeadSize + channel,
         sum * (total == 0.f ? 0.f : scale / total));
}

template <class Cache, class Schedule>
__device__ void load_queries(PagedDecodeParams const& p, Schedule const& at, Team const& team,
                             Queries& q) {
  int const group = p.num_heads / p.num_kv_heads;
  Bf16 const* rows[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int const row = team.row_warp * 16 + 8 * h + threadIdx.x % 32 / 4;
    int64_t const head = int64_t{at.first_token() + row / group} * p.num_heads +
                         at.head() * group + row % group;
    rows[h] = row < at.num_tokens() * group ? static_cast<Bf16 const*>(p.q) + head * kHeadSize
                                            : nullptr;
  }
  Products<Cache>::load(q, rows);
}

// Adds up what the teams have of a segment and calls emit(row, channel, maximum, total, sum) for four
// channels each. Before the memory is used again the caller waits for all threads.
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

// Ends the items of a block or cluster that takes them whole.
template <class Cache>
struct WholeItems {
  PagedDecodeParams const& p;
  Exchange* exchange;
  int rank, blocks;
  int round = 0;

  __device__ void operator()(ItemRounds const& at, DecodeShared<1>& shared, uint8_t* memory,
                             int stage, State const& state) {
    int const group = p.num_heads / p.num_kv_heads;
    if (blocks == 1) {
      merge_teams<Cache, 1>(shared, memory, stage, state,
                            [&](int row, int channel, float, float total, float4 sum) {
                              if (row >= group) return;
                              write_row(p, at.first_token(), at.head(), row, channel, sum, total);
                            });
      __syncthreads();
      return;
    }
    int const rows = MAX_CLUSTER / blocks;  // of a receiver
    int const buffer = round % 2;
    if (round++ == 0) cluster_wait();  // all blocks have started
    merge_teams<Cache, 1>(
        shared, memory, stage, state,
        [&](int row, int channel, float maximum, float total, float4 sum) {
          if (row >= group) return;
          int const slot = rank * rows + row % rows;
          auto* const out = &exchange->out[buffer][slot][channel];
          store_remote(reinterpret_cast<float4*>(out), row / rows, sum);
          if (channel == 0) {
            store_remote(&exchange->totals[buffer][slot], row / rows, make_float2(maximum, total));
          }
        });
    cluster_arrive();
    cluster_wait();
    for (int i = threadIdx.x; i < rows * (kHeadSize / 4); i += THREADS) {
      int const local = i / (kHeadSize / 4), channel = i % (kHeadSize / 4) * 4;
      int const row = rank * rows + local;
      if (row >= group) break;
      float2 const* const totals = exchange->totals[buffer];
      float maximum = -INFINITY, total = 0.f;
      for (int b = 0; b < blocks; ++b) maximum = fmaxf(maximum, totals[b * rows + local].x);
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
      for (int b = 0; b < blocks; ++b) {
        int const slot = b * rows + local;
        float const factor = share(totals[slot].x, maximum);
        total += totals[slot].y * factor;
        axpy4(sum, load4(&exchange->out[buffer][slot][channel]), factor);
      }
      write_row(p, at.first_token(), at.head(), row, channel, sum, total);
    }
  }
};

// Ends the segments of a block's equal share: writes whole items, leaves pieces in the workspace.
template <class Cache, int kRowWarps>
struct SharedItems {
  PagedDecodeParams const& p;
  Workspace const& workspace;
  DecodeShares const& shares;
  int32_t page;  // of the step, the segment's first
  Split split{};

  __device__ void operator()(DecodeCursor const& at, DecodeShared<kRowWarps>& shared,
                             uint8_t* memory, int stage, State const& state) {
    DecodeItem const& item = at.item();
    bool const ends_here = at.end() == item.num_pages;
    int const piece = at.first() > 0 ? 0 : ends_here ? -1 : 1;
    int const rows = item.num_tokens * (p.num_heads / p.num_kv_heads);
    merge_teams<Cache, kRowWarps>(
        shared, memory, stage, state,
        [&](int row, int channel, float maximum, float total, float4 sum) {
          if (row >= rows) return;
          if (piece < 0) {
            write_row(p, item.first_token, item.head, row, channel, sum, total);
          } else {
            int64_t const index = workspace.row(blockIdx.x, piece, 16 * kRowWarps, row);
            if (channel == 0) workspace.totals[index] = make_float2(maximum, total);
            store4(workspace.out + index * kHeadSize + channel, sum);
          }
        });
    if (piece == 1) {
      int32_t const last_page = page + item.num_pages - 1;
      split = {item.first_token, item.num_tokens, item.head, shares.block_of(last_page)};
    }
    page += at.end() - at.first();
    __syncthreads();
  }
};

// All segments of a schedule, which has been read: each team streams its slices through its stages and
// its own softmax; only the end of a segment brings the block together.
template <class Cache, int kRowWarps, class Schedule, class Finish>
__device__ void attend_segments(PagedDecodeParams const& p, Schedule at, int rank, int blocks,
                                uint8_t* memory, int stages, Finish& finish) {
  using S = Shape<Cache, kRowWarps>;
  using P = Products<Cache>;
  auto& shared = *reinterpret_cast<DecodeShared<kRowWarps>*>(memory + stages * STAGE_BYTES);
  Team const team(kRowWarps);
  Queries q;
  load_queries<Cache>(p, at, team, q);
  Loader<Cache, kRowWarps, Schedule> loader(p, at, rank, blocks, shared_address(memory),
                                            shared.slices);
  for (int s = 0; s < stages; ++s) {
    loader.load(s);
    commit_copies();
  }
  int const group = p.num_heads / p.num_kv_heads;
  int32_t token[2];  // of the item, to which the lane's rows belong
  for (int h = 0; h < 2; ++h) {
    token[h] = (team.row_warp * 16 + 8 * h + static_cast<int>(threadIdx.x) % 32 / 4) / group;
  }
  constexpr float kLog2E = 1.44269504088896341f;
  float const scale_log2 =
      p.softmax_scale * kLog2E * (p.kv_scale == nullptr ? 1.f : *p.kv_scale);
  uint32_t const ring = shared_address(memory) + team.index * kRowWarps * WARP_BYTES;
  State state;
  state.clear();
  for (int stage = 0;; stage = stage + 1 == stages ? 0 : stage + 1) {
    wait_for_oldest(stages);
    team_sync<kRowWarps>(team);
    int32_t const slice = shared.slices[threadIdx.x / 32][stage];
    int32_t const visible = slice & (LAST_SLICE - 1);
    uint32_t const keys = ring + stage * STAGE_BYTES;
#pragma unroll 1
    for (int first = 0; first < min(visible, S::KEYS); first += P::KEYS) {
      int32_t const last_token = visible - first - (at.num_tokens() - 1);
      int32_t const limit[2] = {last_token + token[0], last_token + token[1]};
      uint32_t const from = keys + first * P::CHUNKS * 16;
      attend<Cache>(state, q, scale_log2, from, from + S::SLICE_BYTES, limit);
    }
    if ((slice & LAST_SLICE) != 0) {
      finish(at, shared, memory, stage, state);
      at.next();
      if (at.done()) break;
      load_queries<Cache>(p, at, team, q);
      state.clear();
    }
    team_sync<kRowWarps>(team);  // the stage is free
    loader.load(stage);
    commit_copies();
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

// A selection's pages may lie anywhere in the row of the table.
__device__ void prefetch_table(PagedDecodeParams const& p, int32_t request, int32_t length) {
  int32_t const* const row = p.tokens.block_offsets + int64_t{request} * p.tokens.max_pages;
  int32_t const end = min(p.tokens.max_pages, (length + kBlockSize - 1) / kBlockSize);
  for (int32_t i = threadIdx.x * 32; i < end; i += THREADS * 32) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(row + i));
  }
}

// Selections, an item a cluster. Grid: clusters in rounds over the items.
template <class Cache>
__global__ void __launch_bounds__(THREADS, 1)
    selected_decode_kernel(__grid_constant__ PagedDecodeParams const p, int stages) {
  extern __shared__ __align__(128) uint8_t memory[];
  let_next_kernel_start();
  int const blocks = cluster_size(), rank = cluster_rank();
  if (blocks > 1) cluster_arrive();
  auto* const exchange = reinterpret_cast<Exchange*>(memory + stages * STAGE_BYTES +
                                                     sizeof(DecodeShared<1>));
  ItemRounds at(p, static_cast<int32_t>(blockIdx.x) / blocks,
                static_cast<int32_t>(gridDim.x) / blocks);
  at.read();
  ItemRounds ahead = at;
  ahead.resolve();
  prefetch_table(p, ahead.request(), ahead.length());
  // So far only inputs of the step were read, from here on results of its kernels.
  wait_for_previous_kernel();
  WholeItems<Cache> finish{p, exchange, rank, blocks};
  attend_segments<Cache, 1>(p, at, rank, blocks, memory, stages, finish);
}

// Grid: as many blocks as the GPU runs at once.
template <class Cache, int kRowWarps>
__global__ void __launch_bounds__(THREADS, 1)
    decode_kernel(__grid_constant__ PagedDecodeParams const p, int group_tokens,
                  Workspace const workspace) {
  extern __shared__ __align__(128) uint8_t memory[];
  let_next_kernel_start();
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
  if (p.block_ids != nullptr) prefetch_table(p, cursor.request(), cursor.length());
  // So far only inputs of the step were read, from here on results of its kernels.
  wait_for_previous_kernel();
  SharedItems<Cache, kRowWarps> finish{p, workspace, shares, begin};
  attend_segments<Cache, kRowWarps>(p, cursor, 0, 1, memory, MAX_STAGES, finish);
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
  write_row(p, split.first_token, split.head, row, 4 * lane, sum, total);
}

// Warps of 16 query rows that an item gets, and the tokens that fit into them. A selection belongs to
// one token, so its items have one.
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

template <class Cache, int kRowWarps>
cudaError_t launch_shares(PagedDecodeParams const& p, int group_tokens, Device const& device,
                          void* memory, cudaStream_t stream) {
  using S = Shape<Cache, kRowWarps>;
  constexpr size_t SHARED = MAX_STAGES * STAGE_BYTES + sizeof(DecodeShared<kRowWarps>);
  auto* const kernel = decode_kernel<Cache, kRowWarps>;
  cudaError_t status = allow_shared(kernel, SHARED);
  if (status != cudaSuccess) return status;
  int const blocks = std::min(device.processors, MAX_BLOCKS);
  Workspace const workspace = carve(memory, S::ROWS);
  // The merge runs under the same division of L1: changing it would empty the processors first.
  status = cudaFuncSetAttribute(merge_kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                cudaSharedmemCarveoutMaxShared);
  if (status != cudaSuccess) return status;
  status = launch_behind(kernel, dim3(blocks), dim3(THREADS), SHARED, stream, p, group_tokens,
                         workspace);
  if (status != cudaSuccess) return status;
  int const rows = p.num_heads / p.num_kv_heads * group_tokens;
  return launch_behind(
      merge_kernel, dim3(blocks, static_cast<unsigned>(ceil_div(rows, MERGE_ROWS))),
      dim3(32 * MERGE_WARPS * MERGE_ROWS), 0, stream, p, static_cast<int>(S::ROWS), workspace);
}

// How a selection's items are laid over the GPU.
struct Rounds {
  int cluster;   // blocks of an item
  int clusters;  // at once
};

// The cluster with the shortest rounds: pages of a block, and a page's time for joining. Clusters of
// four and more stay within groups of 16 processors.
Rounds rounds_of(int items, int top_k, int processors) {
  Rounds best{};
  int64_t best_cost = 0;
  for (int cluster = 1; cluster <= MAX_CLUSTER; cluster *= 2) {
    int const at_once =
        std::max(1, cluster < 4 ? processors / cluster : processors / 16 * 16 / cluster);
    int64_t const rounds = ceil_div(items, at_once);
    int64_t const pages = ceil_div(top_k, cluster) + (cluster > 1 ? 1 : 0);
    int64_t const cost = rounds * (2 * pages + 1);
    if (best.cluster == 0 || cost < best_cost) {
      best = {cluster, static_cast<int>(ceil_div(items, rounds))};
      best_cost = cost;
    }
  }
  return best;
}

template <class Cache>
cudaError_t launch_rounds(PagedDecodeParams const& p, Device const& device, cudaStream_t stream) {
  auto* const kernel = selected_decode_kernel<Cache>;
  Rounds const rounds =
      rounds_of(p.num_decode * p.q_len * p.num_kv_heads, p.top_k, device.processors);
  // No more shared memory than one block's pages take: the next kernel's blocks may then come early.
  constexpr int PAGES = Shape<Cache, 1>::PAGES;
  bool const is_single = rounds.clusters * rounds.cluster >= p.num_decode * p.q_len *
                                                                 p.num_kv_heads * rounds.cluster;
  int const stages = is_single ? std::min<int>(MAX_STAGES, static_cast<int>(ceil_div(
                                                   p.top_k, PAGES * rounds.cluster)))
                               : MAX_STAGES;
  size_t const shared = stages * STAGE_BYTES + sizeof(DecodeShared<1>) +
                        (rounds.cluster > 1 ? sizeof(Exchange) : 0);
  cudaError_t status = allow_shared(kernel, shared);
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (status != cudaSuccess) return status;
  return launch_clusters_behind(kernel, rounds.cluster, dim3(rounds.clusters * rounds.cluster),
                                dim3(THREADS), shared, stream, p, stages);
}

template <class Cache>
cudaError_t launch(PagedDecodeParams const& p, void* workspace, cudaStream_t stream) {
  Device device{};
  cudaError_t status = current(device);
  if (status != cudaSuccess) return status;
  if (p.block_ids != nullptr) {
    cudaFuncAttributes compiled;
    status = cudaFuncGetAttributes(&compiled, selected_decode_kernel<Cache>);
    if (status != cudaSuccess) return status;
    if (device.major >= 9 && compiled.ptxVersion >= 90) {
      return launch_rounds<Cache>(p, device, stream);
    }
  }
  Tiling const tiling = tiling_of(p.num_heads, p.num_kv_heads, p.q_len, p.block_ids != nullptr);
  switch (tiling.row_warps) {
    case 1:
      return launch_shares<Cache, 1>(p, tiling.tokens, device, workspace, stream);
    case 2:
      return launch_shares<Cache, 2>(p, tiling.tokens, device, workspace, stream);
    default:
      return launch_shares<Cache, 4>(p, tiling.tokens, device, workspace, stream);
  }
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
