#include <algorithm>

#include "kernels/paged_decode_attend.cuh"
#include "kernels/smxx_selected_decode.h"
#include "kernels/this_device.h"

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
                      int stage, State const& state) {
    DecodeItem const& item = at.item();
    bool const ends_here = at.end() == item.num_pages;
    int const piece = at.first() > 0 ? 0 : ends_here ? -1 : 1;
    merge_teams<Cache, kRowWarps>(
        shared, memory, stage, state,
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
  if (kSelected) prefetch_table(p, cursor.request(), cursor.length());
  // So far only inputs of the step were read, from here on results of its kernels.
  wait_for_previous_kernel();
  SharedItems<kRowWarps> finish{p, group, workspace, shares, begin};
  attend_segments<Cache, kRowWarps, kSelected, kBulk>(p, maps, group, cursor, 0, 1, memory,
                                                      MAX_STAGES, finish);
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

template <class Cache, int kRowWarps, bool kSelected, bool kBulk>
cudaError_t launch_shares(PagedDecodeParams const& p, int group_tokens, void* memory,
                          cudaStream_t stream) {
  using S = Shape<Cache, kRowWarps>;
  constexpr size_t SHARED = MAX_STAGES * STAGE_BYTES + sizeof(DecodeShared<kRowWarps>);
  int processors = 0;
  cudaError_t status = count_processors(processors);
  if (status != cudaSuccess) return status;
  auto* const kernel = decode_kernel<Cache, kRowWarps, kSelected, kBulk>;
  status = allow_shared(kernel, SHARED);
  if (status != cudaSuccess) return status;
  BulkMaps maps{};
  if (kBulk) status = encode_view(maps, p.view, S::KEYS);
  if (status != cudaSuccess) return status;
  int const blocks = std::min(processors, MAX_BLOCKS);
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

template <class Cache, bool kBulk>
cudaError_t launch_dense(PagedDecodeParams const& p, void* workspace, cudaStream_t stream) {
  Tiling const tiling = tiling_of(p.num_heads, p.num_kv_heads, p.q_len, false);
  switch (tiling.row_warps) {
    case 1:
      return launch_shares<Cache, 1, false, kBulk>(p, tiling.tokens, workspace, stream);
    case 2:
      return launch_shares<Cache, 2, false, kBulk>(p, tiling.tokens, workspace, stream);
    default:
      return launch_shares<Cache, 4, false, kBulk>(p, tiling.tokens, workspace, stream);
  }
}

template <class Cache>
cudaError_t launch(PagedDecodeParams const& p, void* workspace, cudaStream_t stream) {
  bool bulk = false;
  cudaError_t const status = has_clusters(bulk);
  if (status != cudaSuccess) return status;
  if (p.block_ids == nullptr) {
    return bulk ? launch_dense<Cache, true>(p, workspace, stream)
                : launch_dense<Cache, false>(p, workspace, stream);
  }
  return bulk ? launch_selected_decode(p, stream)
              : launch_shares<Cache, 1, true, false>(p, 1, workspace, stream);
}

// Keys of a page come first, its values behind them.
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

bool has_paged_decode() {
  constexpr size_t SHARED = MAX_STAGES * STAGE_BYTES + sizeof(DecodeShared<4>);
  static_assert(sizeof(DecodeShared<4>) >= sizeof(DecodeShared<1>), "the largest of the kernels'");
  int most = 0;
  return read_attribute(most, cudaDevAttrMaxSharedMemoryPerBlockOptin) == cudaSuccess &&
         most >= static_cast<int>(SHARED);
}

cudaError_t launch_paged_decode(PagedDecodeParams const& p, void* workspace, cudaStream_t stream) {
  if (p.num_decode == 0 || p.q_len == 0) return cudaSuccess;
  if (p.num_heads % p.num_kv_heads != 0 || p.num_heads > kMaxGroup * p.num_kv_heads ||
      p.q_len > kMaxDecodeLength || p.num_decode > p.tokens.num_requests ||
      p.num_decode * p.q_len > p.tokens.num_tokens || p.top_k > kMaxSelectedBlocks ||
      (p.block_ids == nullptr) != (p.top_k == 0)) {
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
