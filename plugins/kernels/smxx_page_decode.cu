#include "kernels/arriving_ids.cuh"
#include "kernels/cluster.cuh"
#include "kernels/global_memory.cuh"
#include "kernels/paged_decode_attend.cuh"
#include "kernels/paged_decode_page.cuh"
#include "kernels/smxx_page_decode.h"

namespace m3::kernels {
namespace {

using namespace paged_decode;

constexpr int PAGES = 16;  // of an item: a cluster of so many blocks
constexpr int PAGE_THREADS = 32 * PAGE_WARPS;
static_assert(PAGES == kMaxGroup, "a block joins and writes one row");

template <class Cache>
struct alignas(1024) PageShared {
  uint8_t keys[kBlockSize * kHeadSize * sizeof(Cache)];  // before them the table
  uint8_t values[sizeof(keys)];
  uint8_t rows[kMaxGroup * ROW_BYTES];  // queries, later weights
  WarpRows maxima, sums;
  float out[PAGES][kHeadSize];  // of the block's row, from the blocks of the cluster
  float2 totals[PAGES];         // maximum and sum of the weights
  float factors[PAGES];
  uint64_t out_arrived, totals_arrived, queries_arrived, keys_arrived, values_arrived;
  int visible;  // keys of the block's page that the item sees, 0 without a page
};

// An item's row of the page table, an input of the step: in shared memory before the selection is
// known, or on its way to L2 where it is too long.
class TableRow {
 public:
  template <class Cache>
  __device__ TableRow(PackedTokens const& tokens, ItemRounds const& item, PageShared<Cache>& shared)
      : row_(tokens.block_offsets + int64_t{item.request()} * tokens.max_pages),
        pages_(min(tokens.max_pages, (item.length() + kBlockSize - 1) / kBlockSize)),
        copy_(reinterpret_cast<int32_t*>(shared.keys)),
        fits_(pages_ <= static_cast<int32_t>(sizeof(shared.keys) / sizeof(int32_t))) {
    if (fits_) {
      for (int32_t i = threadIdx.x; i < pages_; i += PAGE_THREADS) copy_[i] = row_[i];
    } else {
      for (int32_t i = threadIdx.x * 32; i < pages_; i += PAGE_THREADS * 32) prefetch(row_ + i);
    }
  }
  __device__ int32_t page(int32_t block) const {
    if (block < 0 || block >= pages_) return -1;
    return fits_ ? copy_[block] : row_[block];
  }

 private:
  int32_t const* row_;
  int32_t pages_;
  int32_t* copy_;
  bool fits_;
};

// The selected page of a rank, and how many of its keys the item sees; -1 where there are fewer.
__device__ int2 find_page(int32_t const* ids, int32_t top_k, ItemRounds const& item,
                          TableRow const& table, int rank) {
  int const lane = threadIdx.x % 32;
  int32_t const id = lane < top_k ? wait_for_id(ids + lane) : -1;
  __syncwarp();
  int32_t const page = table.page(id);
  unsigned const existing = __ballot_sync(~0u, page >= 0);
  int const place = page >= 0 ? __popc(existing & ((1u << lane) - 1)) : -1;
  int const source = __ffs(__ballot_sync(~0u, place == rank)) - 1;
  if (source < 0) return make_int2(-1, 0);
  int32_t const keys = min(kBlockSize, item.length() - id * kBlockSize);
  return make_int2(__shfl_sync(~0u, page, source), __shfl_sync(~0u, keys, source));
}

// A head's keys or values of a page.
template <size_t kBytes>
__device__ void copy_page(uint8_t (&to)[kBytes], CUtensorMap const& from, uint32_t arrived,
                          int channel, int id) {
  constexpr int COLUMN = kBlockSize * 128;
  expect_bulk(arrived, kBytes);
#pragma unroll
  for (int c = 0; c < static_cast<int>(kBytes) / COLUMN; ++c) {
    copy_bulk(shared_address(to) + c * COLUMN, &from, arrived, channel + 64 * c, 0, id);
  }
}

// Grid: a cluster for each item, a block for each of its pages.
template <class Cache>
__global__ void __launch_bounds__(PAGE_THREADS, 2)
    page_decode_kernel(__grid_constant__ PagedDecodeParams const p,
                       __grid_constant__ BulkMaps const maps, int group) {
  using P = PageProducts<Cache>;
  extern __shared__ __align__(1024) uint8_t memory[];
  let_next_kernel_start();
  auto& shared = *reinterpret_cast<PageShared<Cache>*>(memory);
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = cluster_rank();
  uint32_t const queries_arrived = shared_address(&shared.queries_arrived);
  uint32_t const keys_arrived = shared_address(&shared.keys_arrived);
  uint32_t const values_arrived = shared_address(&shared.values_arrived);
  if (threadIdx.x == 0) {
    init_bulk_barrier(queries_arrived);
    init_bulk_barrier(keys_arrived);
    init_bulk_barrier(values_arrived);
    init_exchange(&shared.out_arrived);
    init_exchange(&shared.totals_arrived);
    if (rank < group) {
      expect_exchange(&shared.out_arrived, sizeof(shared.out));
      expect_exchange(&shared.totals_arrived, sizeof(shared.totals));
    }
  } else if (threadIdx.x == 32) {
    prefetch_map(&maps.keys);
    prefetch_map(&maps.values);
  }
  __syncthreads();
  cluster_arrive();
  ItemRounds item(p, static_cast<int32_t>(blockIdx.x) / PAGES, 1);
  item.read();
  // What the kernel before has yet to write may be on its way to L2 already.
  int32_t const* ids =
      p.block_ids + (int64_t{item.head()} * p.tokens.num_tokens + item.first_token()) * p.top_k;
  auto const* const queries = static_cast<Bf16 const*>(p.q) + item.query(0, group) * kHeadSize;
  if (threadIdx.x < group * 2) prefetch(queries + threadIdx.x * (kHeadSize / 2));
  int32_t const mark = look_for_mark(ids, p.top_k);
  item.resolve();
  TableRow const table(p.tokens, item, shared);
  compute_now(ids);
  fence_bulk();  // the keys take its place
  __syncthreads();
  cluster_wait();  // all blocks have started
  // So far only inputs of the step were used, from here on results of its kernels.
  // Two warps start copies.
  if (warp < 2 && !ids_come(mark)) wait_for_previous_kernel();

  if (threadIdx.x == 32) {
    expect_bulk(queries_arrived, group * ROW_BYTES);
    copy_bulk(shared_address(shared.rows), queries, queries_arrived, group * ROW_BYTES);
  }
  if (warp == 0) {  // the only one that reads the table, so it need not wait for others
    int2 const found = find_page(ids, p.top_k, item, table, rank);
    if (lane == 0) {
      if (found.x >= 0) {
        int const channel = static_cast<int>(item.head() * p.view.head_stride);
        int const id = found.x * p.view.ids_per_page + item.head() * p.view.ids_per_head;
        copy_page(shared.keys, maps.keys, keys_arrived, channel, id);
        copy_page(shared.values, maps.values, values_arrived, channel, id);
      }
      shared.visible = found.y;
    }
  }
  __syncthreads();
  int const visible = shared.visible;
  // To the block that joins and writes the row.
  auto const send_total = [&](float2 total) {
    store_remote(&shared.totals[rank], &shared.totals_arrived, threadIdx.x, total);
  };
  float out[2][4] = {};
  if (visible > 0) {
    constexpr float kLog2E = 1.44269504088896341f;
    float scale_log2 = p.softmax_scale * kLog2E;
    if (p.kv_scale != nullptr) scale_log2 *= *p.kv_scale;
    QueryRows q;
    wait_bulk(queries_arrived, 0);
    load_queries<Cache>(q, shared.rows);
    float s[2][4] = {}, maximum[2] = {-INFINITY, -INFINITY};
    wait_bulk(keys_arrived, 0);
    score_keys<Cache>(s, q, shared.keys);
    int const first_key = warp * WARP_KEYS + lane % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float const scale = scale_log2 * q.scale[h];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = s[i / 2][2 * h + i % 2];
        x = first_key + i / 2 * 8 + i % 2 < visible ? x * scale : -INFINITY;
        maximum[h] = fmaxf(maximum[h], x);
      }
      maximum[h] = row_max(maximum[h]);
      if (lane % 4 == 0) shared.maxima.x[lane / 4 + 8 * h][warp] = maximum[h];
    }
    __syncthreads();  // queries and keys have been read as well
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int const row = lane / 4 + 8 * h;
      maximum[h] = shared.maxima.largest(row);
      float const base =
          (maximum[h] == -INFINITY ? 0.f : maximum[h]) - Products<Cache>::WEIGHT_SHIFT;
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float const low = exp2_flushed(s[n][2 * h] - base);
        float const high = exp2_flushed(s[n][2 * h + 1] - base);
        sum += low + high;
        uint32_t const at = swizzled<16>(row, 2 * warp + n) + lane % 4 * 4;
        *reinterpret_cast<uint32_t*>(shared.rows + at) = P::pack(low, high);
      }
      sum = row_sum(sum);
      if (lane % 4 == 0) shared.sums.x[row][warp] = sum;
    }
    wait_bulk(values_arrived, 0);
    if (visible < kBlockSize) {  // what lies behind may be NaN
      constexpr int CHUNKS = kHeadSize * sizeof(Cache) / 16;
      for (int i = visible * CHUNKS + threadIdx.x; i < kBlockSize * CHUNKS; i += PAGE_THREADS) {
        store_zeros(shared_address(shared.values) + key_chunk(kBlockSize, i / CHUNKS, i % CHUNKS));
      }
    }
    __syncthreads();
    if (threadIdx.x < group) {
      int const row = threadIdx.x;
      send_total(make_float2(shared.maxima.largest(row), shared.sums.sum(row)));
    }
    P::sum(out, shared_address(shared.rows), shared_address(shared.values));
  } else {
    wait_bulk(queries_arrived, 0);
    if (threadIdx.x < group) send_total(make_float2(-INFINITY, 0.f));
  }

  P::for_rows(out, [&](int h, int channel, float4 sum) {
    int const row = lane / 4 + 8 * h;
    if (row >= group) return;
    auto* const to = reinterpret_cast<float4*>(&shared.out[rank][channel]);
    store_remote(to, &shared.out_arrived, row, sum);
  });
  wait_for_previous_kernel();
  if (warp > 0 || rank >= group) return;
  wait_exchange(&shared.totals_arrived, 0);
  float2 const of_page = shared.totals[lane % PAGES];
  float largest = of_page.x;
#pragma unroll
  for (int i = PAGES / 2; i > 0; i /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, i));
  float const factor = share(of_page.x, largest);
  if (lane < PAGES) shared.factors[lane] = factor;
  float total = of_page.y * factor;
#pragma unroll
  for (int i = PAGES / 2; i > 0; i /= 2) total += __shfl_xor_sync(~0u, total, i);
  __syncwarp();
  wait_exchange(&shared.out_arrived, 0);
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
  for (int b = 0; b < PAGES; ++b) {
    axpy4(sum, load4(&shared.out[b][4 * lane]), shared.factors[b]);
  }
  write_row(p, item.query(rank, group), 4 * lane, sum, total);
}

template <class Cache>
cudaError_t launch(PagedDecodeParams const& p, cudaStream_t stream) {
  auto* const kernel = page_decode_kernel<Cache>;
  cudaError_t status = allow_shared(kernel, sizeof(PageShared<Cache>));
  if (status != cudaSuccess) return status;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (status != cudaSuccess) return status;
  // The kernels around it run under the same division of L1: changing it would empty the
  // processors first.
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                cudaSharedmemCarveoutMaxShared);
  if (status != cudaSuccess) return status;
  BulkMaps maps;
  status = encode_view(maps, p.view, kBlockSize);
  if (status != cudaSuccess) return status;
  int const items = p.num_decode * p.q_len * p.num_kv_heads;
  return launch_clusters_behind(kernel, PAGES, dim3(items * PAGES), dim3(PAGE_THREADS),
                                sizeof(PageShared<Cache>), stream, p, maps,
                                p.num_heads / p.num_kv_heads);
}

}  // namespace

bool suits_page_decode(int items, int top_k, int processors) {
  return top_k <= PAGES && items * PAGES <= processors;
}

cudaError_t launch_page_decode(PagedDecodeParams const& p, cudaStream_t stream) {
  return p.view.type == Type::kBfloat16 ? launch<Bf16>(p, stream) : launch<E4m3>(p, stream);
}

}  // namespace m3::kernels
