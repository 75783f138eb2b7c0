#include <algorithm>

#include "kernels/arriving_ids.cuh"
#include "kernels/cluster.cuh"
#include "kernels/global_memory.cuh"
#include "kernels/paged_decode_attend.cuh"
#include "kernels/smxx_page_decode.h"
#include "kernels/smxx_selected_decode.h"
#include "kernels/this_device.h"

namespace m3::kernels {
namespace {

using namespace paged_decode;

// Where the blocks of a cluster leave their results of an item for each other: each row for the
// block that writes it. Twice, so that a block can leave the next item's while others read.
constexpr int MAX_SLOTS = 20;  // blocks times rows of each, see CLUSTERS
struct alignas(128) Exchange {
  float out[2][MAX_SLOTS][kHeadSize];  // [block, row of the receiver]
  float2 totals[2][MAX_SLOTS];         // maximum and sum of the weights
  uint64_t arrived[2];
};

// Ends the items of a block that takes them whole.
struct OwnItems {
  PagedDecodeParams const& p;
  int group;

  template <class Cache, class Items>
  __device__ void end(Items const& at, DecodeShared<1>& shared, uint8_t* memory, int stage,
                      State const& state) {
    wait_for_previous_kernel();
    merge_teams<Cache, 1>(shared, memory, stage, state,
                          [&](int row, int channel, float, float total, float4 sum) {
                            if (row >= group) return;
                            write_row(p, at.query(row, group), channel, sum, total);
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

  template <class Cache, class Items>
  __device__ void end(Items const& at, DecodeShared<1>& shared, uint8_t* memory, int stage,
                      State const& state) {
    wait_for_previous_kernel();
    int const buffer = round % 2;
    auto const& totals = exchange.totals[buffer];
    uint64_t* const arrived = &exchange.arrived[buffer];
    int const own_rows = max(0, min(rows, group - rank * rows));
    if (threadIdx.x == 0) {
      expect_exchange(arrived, blocks * own_rows * (kHeadSize * sizeof(float) + sizeof(float2)));
    }
    if (round == 0) cluster_wait();  // all blocks have started
    merge_teams<Cache, 1>(shared, memory, stage, state,
                          [&](int row, int channel, float maximum, float total, float4 sum) {
                            if (row >= group) return;
                            int const owner = row / rows, slot = rank * rows + row - owner * rows;
                            auto* const to =
                                reinterpret_cast<float4*>(&exchange.out[buffer][slot][channel]);
                            store_remote(to, arrived, owner, sum);
                            if (channel == 0) {
                              store_remote(&exchange.totals[buffer][slot], arrived, owner,
                                           make_float2(maximum, total));
                            }
                          });
    wait_exchange(arrived, round / 2 % 2);
    ++round;
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
      write_row(p, at.query(rank * rows + row, group), channel, sum, total);
    }
    fence_bulk();
    __syncthreads();
  }
};

// Selections, an item a cluster. Grid: clusters in rounds over the items.
template <class Cache, bool kJoins, bool kContext>
__global__ void __launch_bounds__(THREADS, 1)
    selected_decode_kernel(__grid_constant__ PagedDecodeParams const p,
                           __grid_constant__ BulkMaps const maps, int group, int stages) {
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
  RowRounds<kContext> at(p, static_cast<int32_t>(blockIdx.x) / blocks,
                         static_cast<int32_t>(gridDim.x) / blocks);
  at.read();
  // What the kernel before has yet to write may be on its way to L2 already.
  int64_t const ids = int64_t{at.head()} * p.tokens.num_tokens + at.first_token();
  if (threadIdx.x < group * kHeadSize * sizeof(Bf16) / 128) {
    prefetch(static_cast<uint8_t const*>(p.q) + at.query(0, group) * kHeadSize * sizeof(Bf16) +
             threadIdx.x * 128);
  }
  int32_t const mark = kContext ? 0 : look_for_mark(p.block_ids + ids * p.top_k, p.top_k);
  RowRounds<kContext> ahead = at;
  ahead.resolve();
  prefetch_table(p, ahead.request(), ahead.length());
  // So far only inputs of the step were used, from here on results of its kernels.
  if (!ids_come(mark)) wait_for_previous_kernel();
  if constexpr (kJoins) {
    JoinedItems finish{p, group, exchange, rank, blocks, (kMaxGroup + blocks - 1) / blocks};
    attend_segments<Cache, 1, true, true>(p, maps, group, at, rank, blocks, memory, stages, finish);
  } else {
    OwnItems finish{p, group};
    attend_segments<Cache, 1, true, true>(p, maps, group, at, rank, blocks, memory, stages, finish);
  }
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
    int const at_once = size.clusters * processors / MEASURED_PROCESSORS;
    if (at_once == 0) continue;  // too large for this GPU
    int64_t const rounds = ceil_div(items, at_once);
    int64_t const cost = rounds * (ceil_div(8 * top_k, size.cluster) + (size.cluster > 1 ? 12 : 4));
    if (best.cluster == 0 || cost < best_cost) {
      best = {size.cluster, static_cast<int>(ceil_div(items, rounds))};
      best_cost = cost;
    }
  }
  return best;
}

template <class Cache, bool kJoins, bool kContext>
cudaError_t launch_rounds(PagedDecodeParams const& p, Rounds const& rounds, int items,
                          cudaStream_t stream) {
  auto* const kernel = selected_decode_kernel<Cache, kJoins, kContext>;
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
  return launch_clusters_behind(kernel, rounds.cluster, dim3(rounds.clusters * rounds.cluster),
                                dim3(THREADS), shared, stream, p, maps,
                                p.num_heads / p.num_kv_heads, stages);
}

template <class Cache, bool kContext>
cudaError_t launch_items(PagedDecodeParams const& p, int items, int processors,
                         cudaStream_t stream) {
  Rounds const rounds = rounds_of(items, p.top_k, processors);
  return rounds.cluster == 1 ? launch_rounds<Cache, false, kContext>(p, rounds, items, stream)
                             : launch_rounds<Cache, true, kContext>(p, rounds, items, stream);
}

template <class Cache>
cudaError_t launch(PagedDecodeParams const& p, int processors, cudaStream_t stream) {
  if (p.num_context > 0) {
    return launch_items<Cache, true>(p, p.num_context * p.num_kv_heads, processors, stream);
  }
  int const items = p.num_decode * p.q_len * p.num_kv_heads;
  if (suits_page_decode(items, p.top_k, processors)) return launch_page_decode(p, stream);
  return launch_items<Cache, false>(p, items, processors, stream);
}

}  // namespace

cudaError_t has_clusters(bool& result) {
  int major = 0;
  cudaError_t const status = read_attribute(major, cudaDevAttrComputeCapabilityMajor);
  result = major >= 9 && compiled_version(selected_decode_kernel<Bf16, true, false>) >= 90;
  return status;
}

cudaError_t launch_selected_decode(PagedDecodeParams const& p, cudaStream_t stream) {
  int processors = 0;
  cudaError_t status = count_processors(processors);
  if (status != cudaSuccess) return status;
  return p.view.type == Type::kBfloat16 ? launch<Bf16>(p, processors, stream)
                                        : launch<E4m3>(p, processors, stream);
}

}  // namespace m3::kernels
