#include <algorithm>
#include <type_traits>

#include "kernels/mma_sync.cuh"
#include "kernels/packed_tokens.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/smxx_decode_select.h"
#include "kernels/top_blocks.cuh"
#include "kernels/vectors.cuh"

namespace m3::kernels {
namespace {

using Bf16 = __nv_bfloat16;
using E4m3 = __nv_fp8_e4m3;

constexpr int64_t SCORE_BUDGET = int64_t{64} << 20;

// Decode requests [first, first + count) are scored and selected together.
struct Round {
  int32_t first, count;
  uint32_t* scores;      // [count, decode_length, Hi, stride], ordered_score of the floats
  int64_t score_stride;  // max_pages, a multiple of 4
};

struct DecodeRequest {
  int32_t request;  // row of the table
  int32_t first_token, num_tokens;
  int32_t length;  // keys, this step's included

  __device__ int32_t position(int token) const { return length - num_tokens + token; }
};

__device__ DecodeRequest request_at(BlockSelectParams const& p, int32_t d) {
  int32_t const request = p.tokens.num_requests - p.num_decode_requests + d;
  int32_t const first = p.tokens.cu_query_lens[request];
  int32_t const tokens = p.tokens.cu_query_lens[request + 1] - first;
  return {request, first, min(tokens, p.decode_length), p.tokens.sequence_length[request]};
}

// The first blocks of the sequence, those before the last token's own. A token's own block is taken
// whatever it scores, and the blocks before it are full: no score needs a mask. Nothing is scored
// where every token takes all that it sees.
__device__ int32_t scored_blocks(BlockSelectParams const& p, DecodeRequest const& r) {
  int32_t const own = (r.length - 1) / kBlockSize;
  bool const sees_all = min(own + 1, p.tokens.max_pages) <= p.top_k;
  return r.num_tokens <= 0 || sees_all ? 0 : min(own, p.tokens.max_pages);
}

// ---- Scores: the pages of all requests lie end to end on a line, and the warps of the GPU take
// equal pieces of it.

constexpr int MAX_WARPS = 8;
constexpr int SLICE_BYTES = 4096;  // of a page that are loaded and multiplied at once
constexpr int STAGES = 5;          // slices of a warp
constexpr int RING_BYTES = STAGES * SLICE_BYTES;
constexpr int STEPS = kHeadSize / 16;  // channels of one product

// Walks over the line. All lanes of a warp hold the same cursor and call it together.
class PageCursor {
 public:
  __device__ PageCursor(BlockSelectParams const& p, Round const& round) : p_(p), round_(round) {}

  __device__ int32_t count_pages() {
    int32_t sum = 0;
    for (int32_t base = (round_.count - 1) / 32 * 32; base >= 0; base -= 32) {
      read(base);
      sum += lane_blocks_;
    }
    return __reduce_add_sync(~0u, sum);
  }

  // To a page that exists.
  __device__ void seek(int32_t page) {
    for (int32_t base = 0; base < round_.count; base += 32) {
      if (base != base_) read(base);
      int32_t upto = lane_blocks_;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        int32_t const left = __shfl_up_sync(~0u, upto, offset);
        if (lane() >= offset) upto += left;
      }
      unsigned const behind = __ballot_sync(~0u, upto > page);
      if (behind != 0) {
        int const at = __ffs(behind) - 1;
        open(at);
        block_ = page - __shfl_sync(~0u, upto - lane_blocks_, at);
        return;
      }
      page -= __shfl_sync(~0u, upto, 31);
    }
  }

  // To the next page; true when it belongs to another request. Behind the last it stays.
  __device__ bool advance() {
    if (++block_ < num_blocks_) return false;
    unsigned later = __ballot_sync(~0u, lane_blocks_ > 0 && lane() > at_);
    for (int32_t base = base_ + 32; later == 0; base += 32) {
      if (base >= round_.count) return false;
      read(base);
      later = __ballot_sync(~0u, lane_blocks_ > 0);
    }
    open(__ffs(later) - 1);
    block_ = 0;
    return true;
  }

  __device__ DecodeRequest const& request() const { return request_; }
  __device__ int32_t block() const { return block_; }
  __device__ bool is_last() const { return block_ + 1 == num_blocks_; }  // of the request
  __device__ uint32_t* scores() const {  // of the request's first row
    int64_t const rows = int64_t{p_.decode_length} * p_.num_index_heads;
    return round_.scores + (base_ + at_) * rows * round_.score_stride;
  }
  // Whether the block was full before this step.
  __device__ bool is_old() const { return (block_ + 1) * kBlockSize <= request_.position(0); }

 private:
  __device__ static int lane() { return threadIdx.x % 32; }

  // 32 requests, one a lane.
  __device__ void read(int32_t base) {
    base_ = base;
    lane_request_ = {};
    lane_blocks_ = 0;
    if (base + lane() < round_.count) {
      lane_request_ = request_at(p_, round_.first + base + lane());
      lane_blocks_ = scored_blocks(p_, lane_request_);
    }
  }

  __device__ void open(int at) {
    at_ = at;
    request_ = {__shfl_sync(~0u, lane_request_.request, at),
                __shfl_sync(~0u, lane_request_.first_token, at),
                __shfl_sync(~0u, lane_request_.num_tokens, at),
                __shfl_sync(~0u, lane_request_.length, at)};
    num_blocks_ = __shfl_sync(~0u, lane_blocks_, at);
  }

  BlockSelectParams const& p_;
  Round const& round_;
  int32_t base_ = 0, at_ = 0;
  DecodeRequest lane_request_{}, request_{};
  int32_t lane_blocks_ = 0, num_blocks_ = 0;
  int32_t block_ = 0;
};

// A warp's ring of slices.
template <class C>
struct Slices {
  static constexpr int ROW_BYTES = kHeadSize * sizeof(C);
  static constexpr int CHUNKS = ROW_BYTES / 16;
  static constexpr int KEYS = SLICE_BYTES / ROW_BYTES;
  static constexpr int PER_PAGE = kBlockSize / KEYS;
};

// Brings a warp's pages into its ring, a slice at a time.
template <class C>
class SliceLoader {
  using S = Slices<C>;

 public:
  __device__ SliceLoader(BlockSelectParams const& p, PageCursor const& cursor, int32_t num_pages,
                         uint8_t* ring)
      : p_(p), cursor_(cursor), pages_left_(num_pages), ring_(ring) {}

  // The next slice, none behind the last. Until the previous kernel has ended only keys of earlier
  // steps are loaded.
  __device__ void load(int stage) {
    int const lane = threadIdx.x % 32;
    if (pages_left_ > 0) {
      if (slice_ == 0) open_page();
      uint8_t* const to = ring_ + stage * SLICE_BYTES;
      if (page_ >= 0) {
        auto const* const from = static_cast<uint8_t const*>(p_.index_cache) +
                                 int64_t{page_} * (kBlockSize * S::ROW_BYTES) +
                                 slice_ * SLICE_BYTES + lane * 16;
        uint32_t const at = shared_address(to);
#pragma unroll
        for (int i = 0; i < SLICE_BYTES / 512; ++i) {
          int const chunk = i * 32 + lane;
          copy_async(at + swizzled<S::CHUNKS>(chunk / S::CHUNKS, chunk % S::CHUNKS), from + i * 512,
                     true);
        }
      } else {  // a missing page scores like one of NaN
#pragma unroll
        for (int i = 0; i < SLICE_BYTES / 512; ++i) {
          reinterpret_cast<uint4*>(to)[i * 32 + lane] = make_uint4(~0u, ~0u, ~0u, ~0u);
        }
      }
      if (++slice_ == S::PER_PAGE) {
        slice_ = 0;
        if (--pages_left_ > 0) opens_request_ = cursor_.advance();
      }
    }
    commit_copies();
  }

  __device__ void wait_for_previous() {
    if (!waited_) wait_for_previous_kernel();
    waited_ = true;
  }

 private:
  __device__ void open_page() {
    int32_t const block = cursor_.block(), window = block / 32;
    if (opens_request_ || window != window_) {
      table_ = page_of(p_.tokens, cursor_.request().request, window * 32 + threadIdx.x % 32);
      window_ = window;
      opens_request_ = false;
    }
    page_ = __shfl_sync(~0u, table_, block % 32);
    if (!cursor_.is_old()) wait_for_previous();
  }

  BlockSelectParams const& p_;
  PageCursor cursor_;
  int32_t pages_left_;
  uint8_t* ring_;
  int slice_ = 0;
  bool opens_request_ = true, waited_ = false;
  int32_t window_ = 0, table_ = -1;  // 32 entries of the table, one a lane
  int32_t page_ = -1;
};

// The queries of a request as the other operand: column = token * Hi + head.
template <int kTiles>
struct Queries {
  uint32_t pairs[kTiles][STEPS][2];
  float factor[kTiles][2];  // e4m3: what makes real scores of the sums
};

// Which channels meet in a product is free, as long as keys and queries agree. Four e4m3 of a lane
// become two pairs for one step, so its channels 4t .. 4t+3 stand side by side; bf16 has 2t, 2t+1
// and 8 + 2t, 9 + 2t.
template <class C, int kTiles>
__device__ void load_queries(BlockSelectParams const& p, DecodeRequest const& r,
                             Queries<kTiles>& q) {
  constexpr bool kWide = std::is_same_v<C, E4m3>;
  int const lane = threadIdx.x % 32;
  auto const* const first = static_cast<Bf16 const*>(p.index_q) +
                            int64_t{r.first_token} * p.num_index_heads * kHeadSize +
                            lane % 4 * (kWide ? 4 : 2);
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    int const column = n * 8 + lane / 4;
    bool const valid = column < r.num_tokens * p.num_index_heads;
    Bf16 const* const from = first + column * kHeadSize;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        auto const* const pair = from + step * 16 + half * (kWide ? 2 : 8);
        q.pairs[n][step][half] = valid ? *reinterpret_cast<uint32_t const*>(pair) : 0;
      }
    }
  }
}

__device__ float2 unpack_bf16(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// e4m3 are f16 exactly, in one instruction. So queries become f16, times a power of two that brings
// the largest of a row below 2^15: what is down to 2^-32 of it stays exact.
template <int kTiles>
__device__ void queries_to_half(float scale, Queries<kTiles>& q) {
  int const lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < 2 * STEPS; ++i) {
      float2 const x = unpack_bf16(q.pairs[n][i / 2][i % 2]);
      largest = fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y)));
    }
    largest = row_max(fminf(largest, 3e38f));
    // 2^(14 - exponent), and its inverse, both normal numbers.
    uint32_t const field = min(2u * 127 + 14 - (__float_as_uint(largest) >> 23), 253u);
    float const up = __uint_as_float(field << 23), down = __uint_as_float((254 - field) << 23);
#pragma unroll
    for (int i = 0; i < 2 * STEPS; ++i) {
      uint32_t& pair = q.pairs[n][i / 2][i % 2];
      float2 const x = unpack_bf16(pair);
      __half2 const half = __floats2half2_rn(x.x * up, x.y * up);
      pair = reinterpret_cast<uint32_t const&>(half);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      q.factor[n][i] = scale * __shfl_sync(~0u, down, (lane % 4 * 2 + i) * 4);
    }
  }
}

__device__ uint32_t e4m3_to_half(uint32_t pair) {
  __half2_raw const x =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
  return reinterpret_cast<uint32_t const&>(x);
}

// Raises best[n][i], the best score of columns 8n + 2 (lane % 4) + i among the lane's keys.
template <class C, int kTiles>
__device__ void score_slice(uint8_t const* slice, Queries<kTiles> const& q,
                            float (&best)[kTiles][2]) {
  using S = Slices<C>;
  constexpr bool kWide = std::is_same_v<C, E4m3>;
  constexpr int CHAINS = 2;  // of products that do not wait for each other
  int const lane = threadIdx.x % 32;
  uint32_t const keys = shared_address(slice);
#pragma unroll
  for (int tile = 0; tile < S::KEYS / 16; ++tile) {
    float sums[kTiles][CHAINS][4] = {};
#pragma unroll
    for (int chunk = 0; chunk < S::CHUNKS; chunk += 2) {
      uint32_t x[4];
      load_matrices(x, keys + swizzled<S::CHUNKS>(tile * 16 + lane % 16, chunk + lane / 16));
      if constexpr (kWide) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          uint32_t const low = x[2 * part], high = x[2 * part + 1];
          uint32_t const a[4] = {e4m3_to_half(low & 0xffff), e4m3_to_half(high & 0xffff),
                                 e4m3_to_half(low >> 16), e4m3_to_half(high >> 16)};
          auto const& step = q.pairs;
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            multiply_add_half(sums[n][part], a, step[n][chunk + part][0], step[n][chunk + part][1]);
          }
        }
      } else {
        int const step = chunk / 2;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          multiply_add(sums[n][step % CHAINS], x, q.pairs[n][step][0], q.pairs[n][step][1]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float const sum = sums[n][0][i] + sums[n][1][i];
        // fmaxf drops a NaN.
        best[n][i % 2] = fmaxf(best[n][i % 2], kWide ? sum * q.factor[n][i % 2] : sum);
      }
    }
  }
}

// A warp's scores on their way to memory. A score is 4 bytes, and its row continues with the next
// block: single ones would cost the memory more than the keys' last percents.
template <int kTiles>
struct Scores {
  static constexpr int BLOCKS = kTiles <= 2 ? 32 : 64 / kTiles;
  static constexpr int BYTES = kTiles * 8 * BLOCKS * 4;

  uint32_t* staged;  // [columns, BLOCKS]

  // The maximum over the lanes that hold other keys.
  __device__ void stage(int32_t block, float (&best)[kTiles][2]) const {
    int const lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float x = best[n][i];
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) {
          x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
        }
        int const column = n * 8 + lane * 2 + i;
        if (lane < 4) staged[column * BLOCKS + block % BLOCKS] = ordered_score(x);
        best[n][i] = -INFINITY;
      }
    }
  }

  // Blocks [first, last], which share a multiple of BLOCKS.
  __device__ void write(uint32_t* scores, int64_t stride, int columns, int32_t first,
                        int32_t last) const {
    __syncwarp();
    for (int i = threadIdx.x % 32; i < columns * BLOCKS; i += 32) {
      int32_t const block = last / BLOCKS * BLOCKS + i % BLOCKS;
      if (block >= first && block <= last) scores[i / BLOCKS * stride + block] = staged[i];
    }
    __syncwarp();
  }
};

// Grid: as many blocks as the GPU runs at once.
template <class C, int kTiles>
__global__ void __launch_bounds__(32 * MAX_WARPS, 1)
    score_pages_kernel(__grid_constant__ BlockSelectParams const p,
                       __grid_constant__ Round const round) {
  extern __shared__ __align__(128) uint8_t memory[];
  let_next_kernel_start();
  int const warp = threadIdx.x / 32, warps = blockDim.x / 32;
  int64_t const worker = blockIdx.x * warps + warp, workers = gridDim.x * warps;
  PageCursor cursor(p, round);
  int64_t const total = cursor.count_pages();
  auto const begin = static_cast<int32_t>(total * worker / workers);
  auto const end = static_cast<int32_t>(total * (worker + 1) / workers);
  if (begin == end) {
    wait_for_previous_kernel();
    return;
  }
  cursor.seek(begin);
  uint8_t* const ring = memory + warp * RING_BYTES;
  Scores<kTiles> const scores{
      reinterpret_cast<uint32_t*>(memory + warps * RING_BYTES + warp * Scores<kTiles>::BYTES)};
  SliceLoader<C> loader(p, cursor, end - begin, ring);
#pragma unroll 1
  for (int s = 0; s < STAGES; ++s) loader.load(s);
  // So far only results of earlier steps were read.
  loader.wait_for_previous();

  float const scale = p.index_scale == nullptr ? 1.f : *p.index_scale;
  Queries<kTiles> queries;
  float best[kTiles][2];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) best[n][0] = best[n][1] = -INFINITY;
  bool opens_request = true;
  int stage = 0;
  int32_t unwritten = cursor.block();
  for (int32_t page = begin; page < end; ++page) {
    DecodeRequest const& request = cursor.request();
    if (opens_request) {
      load_queries<C>(p, request, queries);
      if constexpr (std::is_same_v<C, E4m3>) queries_to_half(scale, queries);
    }
    for (int slice = 0; slice < Slices<C>::PER_PAGE; ++slice) {
      wait_copies<STAGES - 1>();
      __syncwarp();  // the slice is complete
      score_slice<C>(ring + stage * SLICE_BYTES, queries, best);
      __syncwarp();  // and may be overwritten
      loader.load(stage);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    int32_t const block = cursor.block();
    scores.stage(block, best);
    if (page + 1 == end || cursor.is_last() || (block + 1) % Scores<kTiles>::BLOCKS == 0) {
      scores.write(cursor.scores(), round.score_stride, request.num_tokens * p.num_index_heads,
                   unwritten, block);
      unwritten = block + 1;
    }
    opens_request = page + 1 < end && cursor.advance();
    if (opens_request) unwritten = 0;
  }
}

// ---- Selection: a block of threads for each (request, token, index head).

template <int kThreads>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    select_pages_kernel(__grid_constant__ BlockSelectParams const p,
                        __grid_constant__ Round const round) {
  __shared__ top_blocks::Shared<kThreads> shared;
  let_next_kernel_start();
  int const heads = p.num_index_heads, thread = threadIdx.x;
  int const head = blockIdx.x % heads, token = blockIdx.x / heads % p.decode_length;
  DecodeRequest const request =
      request_at(p, round.first + static_cast<int32_t>(blockIdx.x) / heads / p.decode_length);
  int32_t const num_real = p.tokens.cu_query_lens[p.tokens.num_requests];
  int32_t const first_decode = p.tokens.num_tokens - p.num_decode_requests * p.decode_length;
  auto const ids = [&](int h, int32_t t) {
    return p.block_ids + (int64_t{h} * p.tokens.num_tokens + t) * p.top_k;
  };
  wait_for_previous_kernel();

  int32_t const padding = p.tokens.num_tokens - max(num_real, first_decode);
  for (int32_t i = blockIdx.x; i < padding * heads; i += gridDim.x) {
    if (thread < p.top_k) ids(i % heads, p.tokens.num_tokens - 1 - i / heads)[thread] = -1;
  }
  if (token >= request.num_tokens) return;
  int32_t* const out = ids(head, request.first_token + token);
  int32_t const position = request.position(token);
  int32_t const own = position < 0 ? -1 : position / kBlockSize;
  int32_t const visible = min(own + 1, p.tokens.max_pages);
  if (visible <= p.top_k) {  // all of them, padding rows none
    if (thread < p.top_k) out[thread] = thread < visible ? thread : -1;
    return;
  }
  int32_t const low = p.init_blocks, high = min(visible, own - p.local_blocks + 1);
  int32_t const count = p.top_k - low - (visible - high);
  if (thread < p.top_k) {  // ascending; the own block is the highest id there is
    if (thread < low) out[thread] = thread;
    if (thread >= low + count) out[thread] = high + thread - (low + count);
  }
  if (count == 0) return;
  top_blocks::choose({round.scores + blockIdx.x * round.score_stride, low, high, count}, shared);
  if (thread < count) {
    int32_t const block = shared.chosen[thread];
    int32_t rank = low;
    for (int32_t i = 0; i < count; ++i) rank += shared.chosen[i] < block;
    out[rank] = block;
  }
}

int64_t stride_of(int64_t max_pages) {
  return ceil_div(max_pages, 4) * 4;
}

struct Device {
  int processors, shared_bytes;
};

cudaError_t read_device(Device& device) {
  int id = 0;
  if (auto const error = cudaGetDevice(&id); error != cudaSuccess) return error;
  auto const error = cudaDeviceGetAttribute(&device.processors, cudaDevAttrMultiProcessorCount, id);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
}

// Both kernels run under the same division of L1: changing it would empty the processors first.
cudaError_t ask_for_shared_memory(void const* kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

template <class C, int kTiles>
cudaError_t launch_scores(BlockSelectParams const& p, Round const& round, Device const& device,
                          cudaStream_t stream) {
  constexpr int WARP_BYTES = RING_BYTES + Scores<kTiles>::BYTES;
  auto* const kernel = score_pages_kernel<C, kTiles>;
  int const warps = std::min(MAX_WARPS, device.shared_bytes / WARP_BYTES);
  if (warps == 0) return cudaErrorInvalidConfiguration;
  int const bytes = warps * WARP_BYTES;
  auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  error = ask_for_shared_memory(reinterpret_cast<void const*>(kernel));
  if (error != cudaSuccess) return error;
  return launch_behind(kernel, dim3(device.processors), dim3(32 * warps), bytes, stream, p, round);
}

template <class C>
cudaError_t launch_scores(BlockSelectParams const& p, Round const& round, Device const& device,
                          cudaStream_t stream) {
  int const columns = p.num_index_heads * p.decode_length;
  if (columns <= 8) return launch_scores<C, 1>(p, round, device, stream);
  if (columns <= 16) return launch_scores<C, 2>(p, round, device, stream);
  if (columns <= 32) return launch_scores<C, 4>(p, round, device, stream);
  return launch_scores<C, 8>(p, round, device, stream);
}

template <int kThreads>
cudaError_t launch_selection(BlockSelectParams const& p, Round const& round, int32_t rows,
                             cudaStream_t stream) {
  auto* const kernel = select_pages_kernel<kThreads>;
  auto const error = ask_for_shared_memory(reinterpret_cast<void const*>(kernel));
  if (error != cudaSuccess) return error;
  return launch_behind(kernel, dim3(rows), dim3(kThreads), 0, stream, p, round);
}

cudaError_t launch_round(BlockSelectParams const& p, Round const& round, Device const& device,
                         cudaStream_t stream) {
  auto const error = p.index_scale == nullptr ? launch_scores<Bf16>(p, round, device, stream)
                                              : launch_scores<E4m3>(p, round, device, stream);
  if (error != cudaSuccess) return error;
  // All rows should find room beside the scores' blocks, to wait there.
  int32_t const rows = round.count * p.decode_length * p.num_index_heads;
  return rows <= 2 * device.processors ? launch_selection<256>(p, round, rows, stream)
                                       : launch_selection<128>(p, round, rows, stream);
}

}  // namespace

int64_t decode_select_workspace_bytes(int64_t num_decode_requests, int64_t decode_length,
                                      int64_t num_index_heads, int64_t max_pages) {
  int64_t const request_bytes =
      decode_length * num_index_heads * stride_of(max_pages) * int64_t{sizeof(float)};
  return std::min(num_decode_requests * request_bytes, std::max(SCORE_BUDGET, request_bytes));
}

cudaError_t launch_decode_select(BlockSelectParams const& p, void* workspace, cudaStream_t stream) {
  if (p.num_decode_requests == 0 || p.decode_length == 0) return cudaSuccess;
  if (p.num_index_heads > kMaxIndexHeads || p.decode_length > kMaxDecodeLength ||
      p.top_k > kMaxTopK || p.type != Type::kBfloat16 || p.local_blocks < 1 ||
      p.init_blocks + p.local_blocks > p.top_k) {
    return cudaErrorInvalidValue;
  }
  Device device{};
  if (auto const error = read_device(device); error != cudaSuccess) return error;
  int64_t const stride = stride_of(p.tokens.max_pages);
  int64_t const request_bytes = decode_select_workspace_bytes(1, p.decode_length, p.num_index_heads,
                                                              std::max(p.tokens.max_pages, 1));
  auto const step = static_cast<int32_t>(
      std::clamp<int64_t>(SCORE_BUDGET / request_bytes, 1, p.num_decode_requests));
  for (int32_t first = 0; first < p.num_decode_requests; first += step) {
    Round const round{first, std::min(step, p.num_decode_requests - first),
                      static_cast<uint32_t*>(workspace), stride};
    if (auto const error = launch_round(p, round, device, stream); error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace m3::kernels
