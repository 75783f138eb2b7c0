#include <algorithm>

#include "kernels/paged_decode_loader.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/vectors.cuh"

namespace m3::kernels {
namespace {

using namespace paged_decode;

constexpr int COLUMNS = kHeadSize / WARPS;  // output channels of a warp
constexpr int KEYS = TILE / WARPS;          // keys whose scores a warp computes
constexpr int MERGE_ROWS = 4;               // of a merge block
constexpr int MERGE_WARPS = 2;              // of a row
constexpr int MAX_BLOCKS = 384;             // two for each of 192 multiprocessors
static_assert(KEYS == 16 && COLUMNS == 32, "two score tiles and four output tiles a warp");

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

// Where a warp works: 16 keys of a tile and 32 output channels, and its share of the query rows.
template <int kMTiles>
struct Place {
  int part, first_row, lane;

  __device__ Place()
      : part(threadIdx.x / 32 % WARPS),
        first_row(static_cast<int>(threadIdx.x) / 32 / WARPS * 16 * Shape<kMTiles>::WARP_TILES),
        lane(threadIdx.x % 32) {}
  // The two rows of a fragment that the lane holds, h = 0 and 1.
  __device__ int row(int m, int h) const { return first_row + 16 * m + 8 * h + lane / 4; }
};

// The softmax of an item so far. A warp computes the scores of 16 keys of a tile and sums up 32
// channels over all of them, so maxima are shared, sums of weights each warp's own.
template <int kMTiles>
struct State {
  static constexpr int M = Shape<kMTiles>::WARP_TILES;
  float maximum[M][2];
  float sum[M][2];
  float out[M][COLUMNS / 8][4];

  __device__ void clear() {
#pragma unroll
    for (int m = 0; m < M; ++m) {
      maximum[m][0] = maximum[m][1] = -INFINITY;
      sum[m][0] = sum[m][1] = 0.f;
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; ++n) {
        out[m][n][0] = out[m][n][1] = out[m][n][2] = out[m][n][3] = 0.f;
      }
    }
  }
};

// Scores in units of log2. `token[m][i]`: of the item, to which the lane's row belongs.
template <int kMTiles, int M = Shape<kMTiles>::WARP_TILES>
__device__ void score_tile(DecodeShared<kMTiles> const& shared, int stage, int q_slot,
                           float scale_log2, int32_t limit, bool masked, int const (&token)[M][2],
                           float (&s)[M][2][4]) {
  Place<kMTiles> const at;
  int const lane = at.lane;
  uint32_t const k = shared_address(shared.k[stage]);
  uint32_t const q = shared_address(shared.q[q_slot]);
  int const key_row = at.part * KEYS + lane % 8 + lane / 16 * 8;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int i = 0; i < 8; ++i) s[m][i / 4][i % 4] = 0.f;
  }
#pragma unroll
  for (int step = 0; step < kHeadSize / 16; ++step) {
    uint32_t b[4];
    load_matrices(b, k + swizzled<CHUNKS>(key_row, 2 * step + lane / 8 % 2));
#pragma unroll
    for (int m = 0; m < M; ++m) {
      uint32_t a[4];
      load_matrices(a,
                    q + swizzled<CHUNKS>(at.first_row + 16 * m + lane % 16, 2 * step + lane / 16));
      multiply_add(s[m][0], a, b[0], b[1]);
      multiply_add(s[m][1], a, b[2], b[3]);
    }
  }
  int const first_key = at.part * KEYS + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& x = s[m][i / 4][i % 4];
      x *= scale_log2;
      int const key = first_key + i / 4 * 8 + i % 2;
      if (masked && key >= limit + token[m][i / 2 % 2]) x = -INFINITY;
    }
  }
}

// Turns scores into weights, under the maximum over all warps, and writes them for all warps.
template <int kMTiles, int M = Shape<kMTiles>::WARP_TILES>
__device__ void weigh_tile(DecodeShared<kMTiles>& shared, float (&s)[M][2][4],
                           State<kMTiles>& state) {
  Place<kMTiles> const at;
  int const lane = at.lane;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float const largest = row_max(fmaxf(fmaxf(s[m][0][2 * h], s[m][0][2 * h + 1]),
                                          fmaxf(s[m][1][2 * h], s[m][1][2 * h + 1])));
      if (lane % 4 == 0) shared.maxima[at.part][at.row(m, h)] = largest;
    }
  }
  __syncthreads();  // maxima
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int const row = at.row(m, h);
      float maximum = state.maximum[m][h];
#pragma unroll
      for (int w = 0; w < WARPS; ++w) maximum = fmaxf(maximum, shared.maxima[w][row]);
      // With every score at -inf so far, -inf - -inf would be NaN.
      float const base = maximum == -INFINITY ? 0.f : maximum;
      float const decay = exp2f(state.maximum[m][h] - base);
      state.maximum[m][h] = maximum;
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float const low = exp2f(s[m][n][2 * h] - base), high = exp2f(s[m][n][2 * h + 1] - base);
        sum += low + high;
        auto* const to = reinterpret_cast<uint32_t*>(
            shared.weights + swizzled<TILE / 8>(row, at.part * 2 + n) + lane % 4 * 4);
        *to = pack_bf16(low, high);
      }
      state.sum[m][h] = state.sum[m][h] * decay + sum;
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; ++n) {
        state.out[m][n][2 * h] *= decay;
        state.out[m][n][2 * h + 1] *= decay;
      }
    }
  }
  __syncthreads();  // weights
}

template <int kMTiles, int M = Shape<kMTiles>::WARP_TILES>
__device__ void sum_tile(DecodeShared<kMTiles> const& shared, int stage, State<kMTiles>& state) {
  Place<kMTiles> const at;
  int const lane = at.lane;
  uint32_t const v = shared_address(shared.v[stage]);
  uint32_t const weights = shared_address(shared.weights);
#pragma unroll
  for (int step = 0; step < TILE / 16; ++step) {
    uint32_t b[COLUMNS / 16][4];
#pragma unroll
    for (int n = 0; n < COLUMNS / 16; ++n) {
      load_matrices_transposed(
          b[n], v + swizzled<CHUNKS>(16 * step + lane % 16, at.part * 4 + 2 * n + lane / 16));
    }
#pragma unroll
    for (int m = 0; m < M; ++m) {
      uint32_t a[4];
      load_matrices(
          a, weights + swizzled<TILE / 8>(at.first_row + 16 * m + lane % 16, 2 * step + lane / 16));
#pragma unroll
      for (int n = 0; n < COLUMNS / 16; ++n) {
        multiply_add(state.out[m][2 * n], a, b[n][0], b[n][1]);
        multiply_add(state.out[m][2 * n + 1], a, b[n][2], b[n][3]);
      }
    }
  }
}

// Writes a whole item's result, or a piece to the workspace when `piece` is 0 or 1.
template <int kMTiles, int M = Shape<kMTiles>::WARP_TILES>
__device__ void finish(PagedDecodeParams const& p, Workspace const& workspace,
                       DecodeShared<kMTiles>& shared, DecodeItem const& item, int piece,
                       State<kMTiles> const& state) {
  constexpr int ROWS = Shape<kMTiles>::ROWS;
  Place<kMTiles> const at;
  int const lane = at.lane;
  int const group = p.num_heads / p.num_kv_heads;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float const sum = row_sum(state.sum[m][h]);
      if (lane % 4 == 0) shared.sums[at.part][at.row(m, h)] = sum;
    }
  }
  __syncthreads();  // sums; the next tile's barriers come before they are written again
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int const row = at.row(m, h);
      if (row >= item.num_tokens * group) continue;
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) sum += shared.sums[w][row];
      int const column = at.part * COLUMNS + lane % 4 * 2;
      if (piece < 0) {
        float const factor = sum == 0.f ? 0.f : 1.f / sum;
        int64_t const head =
            int64_t{item.first_token + row / group} * p.num_heads + item.head * group + row % group;
        auto* const to = static_cast<Bf16*>(p.out) + head * kHeadSize + column;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n) {
          *reinterpret_cast<uint32_t*>(to + 8 * n) =
              pack_bf16(state.out[m][n][2 * h] * factor, state.out[m][n][2 * h + 1] * factor);
        }
      } else {
        int64_t const index = workspace.row(blockIdx.x, piece, ROWS, row);
        if (at.part == 0 && lane % 4 == 0) {
          workspace.totals[index] = make_float2(state.maximum[m][h], sum);
        }
        float* const to = workspace.out + index * kHeadSize + column;
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n) {
          *reinterpret_cast<float2*>(to + 8 * n) =
              make_float2(state.out[m][n][2 * h], state.out[m][n][2 * h + 1]);
        }
      }
    }
  }
}

// Tokens behind the real ones, among those of the decode rows.
__device__ void clear_padding(PagedDecodeParams const& p) {
  int32_t const first = max(p.tokens.cu_query_lens[p.tokens.num_requests],
                            p.tokens.num_tokens - p.num_decode * p.q_len);
  int64_t const per_token = int64_t{p.num_heads} * CHUNKS;
  auto* const out = static_cast<uint4*>(p.out);
  for (int64_t i = first * per_token + int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       i < p.tokens.num_tokens * per_token; i += int64_t{gridDim.x} * blockDim.x) {
    out[i] = make_uint4(0, 0, 0, 0);
  }
}

// A selection's pages may lie anywhere in the row of the table.
__device__ void prefetch_table(PagedDecodeParams const& p, DecodeItem const& item) {
  if (p.block_ids == nullptr) return;
  int32_t const* const row = p.tokens.block_offsets + int64_t{item.request} * p.tokens.max_pages;
  int32_t const end = min(p.tokens.max_pages, (item.length + kBlockSize - 1) / kBlockSize);
  for (int32_t i = threadIdx.x * 32; i < end; i += blockDim.x * 32) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(row + i));
  }
}

// Grid: as many blocks as the GPU runs at once.
template <int kMTiles>
__global__ void __launch_bounds__(Shape<kMTiles>::THREADS, Shape<kMTiles>::BLOCKS_PER_SM)
    decode_kernel(__grid_constant__ PagedDecodeParams const p, int group_tokens,
                  Workspace const workspace) {
  using S = Shape<kMTiles>;
  extern __shared__ __align__(128) uint8_t memory[];
  auto& shared = *reinterpret_cast<DecodeShared<kMTiles>*>(memory);
  let_next_kernel_start();

  int32_t const block = blockIdx.x;
  DecodeCursor cursor(p, group_tokens);
  DecodeShares const shares(cursor.count_tiles(), gridDim.x);
  int32_t const begin = shares.begin(block);
  int32_t const count = shares.begin(block + 1) - begin;
  if (count == 0) {
    wait_for_previous_kernel();
    if (threadIdx.x == 0) workspace.splits[block] = {};
    clear_padding(p);
    return;
  }
  cursor.seek(begin);
  prefetch_table(p, cursor.item());
  // So far only inputs of the step were read, from here on results of its kernels.
  wait_for_previous_kernel();
  Loader<kMTiles> loader(p, cursor, shared);
  int32_t loaded = 0;
#pragma unroll
  for (int s = 0; s < S::STAGES - 1; ++s) {
    if (loaded < count) {
      loader.load(s);
      if (++loaded < count) loader.advance();
    }
    commit_copies();
  }
  Split split{};

  constexpr int M = S::WARP_TILES;
  Place<kMTiles> const place;
  int const group = p.num_heads / p.num_kv_heads;
  int token[M][2];
#pragma unroll
  for (int m = 0; m < M; ++m) {
    for (int h = 0; h < 2; ++h) token[m][h] = place.row(m, h) / group;
  }
  constexpr float kLog2E = 1.44269504088896341f;
  float const scale_log2 = p.softmax_scale * kLog2E;
  State<kMTiles> state;
  state.clear();
  bool began_here = cursor.tile() == 0;
  int q_slot = 0, stage = 0, free_stage = S::STAGES - 1;
  for (int32_t i = 0; i < count; ++i) {
    wait_copies<S::STAGES - 2>();
    __syncthreads();  // tile i is here; every warp is done with tile i - 1, whose stage is free
    if (loaded < count) {
      loader.load(free_stage);
      if (++loaded < count) loader.advance();
    }
    commit_copies();
    DecodeItem const& item = cursor.item();
    int32_t const remaining = shared.remaining[stage];
    if (remaining > 0) {
      float s[M][2][4];
      int32_t const limit = remaining - (item.num_tokens - 1);  // of the item's first token
      score_tile<kMTiles>(shared, stage, q_slot, scale_log2, limit, limit < TILE, token, s);
      weigh_tile<kMTiles>(shared, s, state);
      sum_tile<kMTiles>(shared, stage, state);
    }
    bool const ends_here = cursor.tile() + 1 == item.num_tiles;
    if (ends_here || i + 1 == count) {
      int const piece = !began_here ? 0 : ends_here ? -1 : 1;
      finish<kMTiles>(p, workspace, shared, item, piece, state);
      if (piece == 1) {
        int32_t const last_tile = begin + i - cursor.tile() + item.num_tiles - 1;
        split = {item.first_token, item.num_tokens, item.head, shares.block_of(last_tile)};
      }
      state.clear();
      began_here = true;
    }
    if (i + 1 < count && cursor.advance()) q_slot = q_slot + 1 == S::STAGES ? 0 : q_slot + 1;
    stage = stage + 1 == S::STAGES ? 0 : stage + 1;
    free_stage = free_stage + 1 == S::STAGES ? 0 : free_stage + 1;
  }
  if (threadIdx.x == 0) workspace.splits[block] = split;
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
      float const factor = exp2f(piece[j].x - base);
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
  int64_t const head =
      int64_t{split.first_token + row / group} * p.num_heads + split.head * group + row % group;
  float const factor = total == 0.f ? 0.f : 1.f / total;
  store4(static_cast<Bf16*>(p.out) + head * kHeadSize + 4 * lane, sum * factor);
}

// Tiles of 16 query rows that an item gets, and the tokens that fit into them. A selection belongs
// to one token, so its items have one.
struct Tiling {
  int m_tiles, tokens;
};
Tiling tiling_of(int32_t num_heads, int32_t num_kv_heads, int32_t q_len, bool has_block_ids) {
  int const group = num_heads / num_kv_heads;
  int const wanted = has_block_ids ? group : group * q_len;
  int const m_tiles = wanted <= 16 ? 1 : wanted <= 32 ? 2 : 4;
  return {m_tiles, has_block_ids ? 1 : std::max(1, std::min(q_len, 16 * m_tiles / group))};
}

template <int kMTiles>
cudaError_t launch(PagedDecodeParams const& p, int group_tokens, void* memory,
                   cudaStream_t stream) {
  using S = Shape<kMTiles>;
  constexpr int SHARED = sizeof(DecodeShared<kMTiles>);
  int device = 0, processors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  auto* const kernel = decode_kernel<kMTiles>;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
  if (status != cudaSuccess) return status;
  int const blocks = std::min(processors * S::BLOCKS_PER_SM, MAX_BLOCKS);
  Workspace const workspace = carve(memory, S::ROWS);
  // The merge runs under the same division of L1: changing it would empty the processors first.
  status = cudaFuncSetAttribute(merge_kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                cudaSharedmemCarveoutMaxShared);
  if (status != cudaSuccess) return status;
  status = launch_behind(kernel, dim3(blocks), dim3(S::THREADS), SHARED, stream, p, group_tokens,
                         workspace);
  if (status != cudaSuccess) return status;
  int const rows = p.num_heads / p.num_kv_heads * group_tokens;
  return launch_behind(
      merge_kernel, dim3(blocks, static_cast<unsigned>(ceil_div(rows, MERGE_ROWS))),
      dim3(32 * MERGE_WARPS * MERGE_ROWS), 0, stream, p, static_cast<int>(S::ROWS), workspace);
}

}  // namespace

DecodeView view_of_pages(void const* kv_cache, int32_t num_kv_heads) {
  int64_t const token = int64_t{num_kv_heads} * kHeadSize;
  auto const* const keys = static_cast<Bf16 const*>(kv_cache);
  return {keys, keys + kBlockSize * token, 2 * kBlockSize * token, kHeadSize, token, 1, 0};
}

DecodeView view_of_virtual_pages(void const* kv_cache, int32_t num_kv_heads) {
  int64_t const token = int64_t{num_kv_heads} * kHeadSize;
  auto const* const keys = static_cast<Bf16 const*>(kv_cache);
  return {keys, keys + kBlockSize * token, kHeadSize, 0, token, 2 * kBlockSize * num_kv_heads, 1};
}

size_t paged_decode_workspace(int32_t num_heads, int32_t num_kv_heads, int32_t q_len,
                              bool has_block_ids) {
  int64_t const rows = 16 * tiling_of(num_heads, num_kv_heads, q_len, has_block_ids).m_tiles;
  return MAX_BLOCKS * (2 * rows * (kHeadSize * sizeof(float) + sizeof(float2)) + sizeof(Split));
}

cudaError_t launch_paged_decode(PagedDecodeParams const& p, void* workspace, cudaStream_t stream) {
  if (p.num_decode == 0 || p.q_len == 0) return cudaSuccess;
  if (p.num_heads % p.num_kv_heads != 0 || p.num_heads > kMaxGroup * p.num_kv_heads ||
      p.q_len > kMaxDecodeLength || p.top_k > kMaxSelectedBlocks) {
    return cudaErrorInvalidValue;
  }
  Tiling const tiling = tiling_of(p.num_heads, p.num_kv_heads, p.q_len, p.block_ids != nullptr);
  switch (tiling.m_tiles) {
    case 1:
      return launch<1>(p, tiling.tokens, workspace, stream);
    case 2:
      return launch<2>(p, tiling.tokens, workspace, stream);
    default:
      return launch<4>(p, tiling.tokens, workspace, stream);
  }
}

}  // namespace m3::kernels
