#include <algorithm>
#include <type_traits>

#include "kernels/decode_select_pages.cuh"
#include "kernels/mma_sync.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/smxx_decode_select.h"
#include "kernels/this_device.h"
#include "kernels/top_blocks.cuh"
#include "kernels/vectors.cuh"

namespace m3::kernels {
namespace {

using Bf16 = __nv_bfloat16;
using E4m3 = __nv_fp8_e4m3;
using namespace decode_select;

constexpr int64_t SCORE_BUDGET = int64_t{64} << 20;

// ---- Scores. A block of threads takes an equal piece of the line, and each of its warps 16 keys
// of every page.

constexpr int KEYS = 16;
constexpr int WARPS = kBlockSize / KEYS;
constexpr int STEPS = kHeadSize / 16;  // channels of one product

// A warp's ring of slices, 16 keys each.
template <class C>
struct Slices {
  static constexpr int ROW_BYTES = kHeadSize * sizeof(C);
  static constexpr int CHUNKS = ROW_BYTES / 16;
  static constexpr int BYTES = KEYS * ROW_BYTES;
};

// Brings a warp's slices into its ring.
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
    if (pages_left_ > 0) {
      int32_t const page = next_page();
      int const lane = threadIdx.x % 32;
      uint8_t* const to = ring_ + stage * S::BYTES;
      if (page >= 0) {
        auto const* const from = static_cast<uint8_t const*>(p_.index_cache) +
                                 (int64_t{page} * WARPS + threadIdx.x / 32) * S::BYTES + lane * 16;
        uint32_t const at = shared_address(to);
#pragma unroll
        for (int i = 0; i < S::BYTES / 512; ++i) {
          int const chunk = i * 32 + lane;
          copy_async(at + swizzled<S::CHUNKS>(chunk / S::CHUNKS, chunk % S::CHUNKS), from + i * 512,
                     true);
        }
      } else {  // a missing page scores like one of NaN
        for (int i = lane; i < S::BYTES / 16; i += 32) {
          reinterpret_cast<uint4*>(to)[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
        }
      }
      if (--pages_left_ > 0) opens_request_ = cursor_.advance();
    }
    commit_copies();
  }

  __device__ void wait_for_previous() {
    if (!waited_) wait_for_previous_kernel();
    waited_ = true;
  }

 private:
  __device__ int32_t next_page() {
    int32_t const block = cursor_.block(), window = block / 32;
    if (opens_request_ || window != window_) {
      table_ = page_of(p_.tokens, cursor_.request().request, window * 32 + threadIdx.x % 32);
      window_ = window;
    }
    if (!cursor_.is_old()) wait_for_previous();
    return __shfl_sync(~0u, table_, block % 32);
  }

  BlockSelectParams const& p_;
  PageCursor cursor_;
  int32_t pages_left_;
  uint8_t* ring_;
  bool opens_request_ = true, waited_ = false;
  int32_t window_ = 0, table_ = -1;  // 32 entries of the table, one a lane
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
// Through L1: all warps of the GPU want the same few lines when the batch is small.
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

// best[2n + i]: the best score of columns 8n + 2 (lane % 4) + i among the lane's keys.
template <class C, int kTiles>
__device__ void score_slice(uint8_t const* slice, Queries<kTiles> const& q,
                            float (&best)[2 * kTiles]) {
  using S = Slices<C>;
  constexpr bool kWide = std::is_same_v<C, E4m3>;
  constexpr int CHAINS = 2;  // of products that do not wait for each other
  int const lane = threadIdx.x % 32;
  uint32_t const keys = shared_address(slice);
  float sums[kTiles][CHAINS][4] = {};
#pragma unroll
  for (int chunk = 0; chunk < S::CHUNKS; chunk += 2) {
    uint32_t x[4];
    load_matrices(x, keys + swizzled<S::CHUNKS>(lane % 16, chunk + lane / 16));
    if constexpr (kWide) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        uint32_t const low = x[2 * part], high = x[2 * part + 1];
        uint32_t const a[4] = {e4m3_to_half(low & 0xffff), e4m3_to_half(high & 0xffff),
                               e4m3_to_half(low >> 16), e4m3_to_half(high >> 16)};
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          uint32_t const(&b)[2] = q.pairs[n][chunk + part];
          multiply_add_half(sums[n][part], a, b[0], b[1]);
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        uint32_t const(&b)[2] = q.pairs[n][chunk / 2];
        multiply_add(sums[n][chunk / 2 % CHAINS], x, b[0], b[1]);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float upper = sums[n][0][i] + sums[n][1][i], lower = sums[n][0][i + 2] + sums[n][1][i + 2];
      if constexpr (kWide) upper *= q.factor[n][i], lower *= q.factor[n][i];
      best[2 * n + i] = fmaxf(fmaxf(-INFINITY, upper), lower);  // drops a NaN
    }
  }
}

// Scores on their way to memory. A score is 4 bytes and its row continues with the next block:
// single ones would cost the memory more than the keys' last percents.
template <int kTiles>
struct Scores {
  static constexpr int COLUMNS = 8 * kTiles;
  static constexpr int BLOCKS = kTiles <= 2 ? 32 : 64 / kTiles;
  static constexpr int BYTES = WARPS * COLUMNS * BLOCKS * 4;

  uint32_t* staged;  // [warps, columns, blocks]

  // The maximum over the lanes that hold other keys. In each round a lane passes on half of its
  // values and keeps the others.
  __device__ void stage(int32_t block, float (&x)[2 * kTiles]) const {
    int const lane = threadIdx.x % 32;
    int first = 0, copies = 0;
#pragma unroll
    for (int offset = 16; offset >= 4; offset /= 2) {
      int const half = kTiles * offset / 16;
      bool const upper = (lane & offset) != 0;
      if (half == 0) {
        x[0] = fmaxf(x[0], __shfl_xor_sync(~0u, x[0], offset));
        copies |= lane & offset;
        continue;
      }
#pragma unroll
      for (int i = 0; i < half; ++i) {
        float const kept = upper ? x[half + i] : x[i], passed = upper ? x[i] : x[half + i];
        x[i] = fmaxf(kept, __shfl_xor_sync(~0u, passed, offset));
      }
      if (upper) first += half;
    }
    if (copies != 0) return;
#pragma unroll
    for (int i = 0; i < (kTiles + 3) / 4; ++i) {
      int const column = (first + i) / 2 * 8 + lane % 4 * 2 + (first + i) % 2;
      uint32_t* const warp = staged + threadIdx.x / 32 * COLUMNS * BLOCKS;
      warp[column * BLOCKS + block % BLOCKS] = ordered_score(x[i]);
    }
  }

  // Blocks [first, last], which lie in one group of BLOCKS. All warps call it together.
  __device__ void write(uint32_t* scores, int64_t stride, int columns, int32_t first,
                        int32_t last) const {
    __syncthreads();  // staged
    for (int i = threadIdx.x; i < columns * BLOCKS; i += 32 * WARPS) {
      int32_t const block = last / BLOCKS * BLOCKS + i % BLOCKS;
      if (block < first || block > last) continue;
      uint32_t best = 0;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) best = max(best, staged[w * COLUMNS * BLOCKS + i]);
      scores[i / BLOCKS * stride + block] = best;
    }
    __syncthreads();  // read
  }
};

// Grid: as many blocks as the GPU runs at once.
template <class C, int kTiles, int kStages>
__global__ void __launch_bounds__(32 * WARPS, 1)
    score_pages_kernel(__grid_constant__ BlockSelectParams const p,
                       __grid_constant__ Round const round) {
  extern __shared__ __align__(128) uint8_t memory[];
  let_next_kernel_start();
  PageCursor cursor(p, round);
  int64_t const total = cursor.count_pages();
  auto const begin = static_cast<int32_t>(total * blockIdx.x / gridDim.x);
  auto const end = static_cast<int32_t>(total * (blockIdx.x + 1) / gridDim.x);
  if (begin == end) {
    wait_for_previous_kernel();
    return;
  }
  cursor.seek(begin);
  constexpr int RING_BYTES = kStages * Slices<C>::BYTES;
  uint8_t* const ring = memory + threadIdx.x / 32 * RING_BYTES;
  Scores<kTiles> const scores{reinterpret_cast<uint32_t*>(memory + WARPS * RING_BYTES)};
  uint8_t const* const idle = memory + WARPS * RING_BYTES + Scores<kTiles>::BYTES;
  SliceLoader<C> loader(p, cursor, end - begin, ring);
#pragma unroll 1
  for (int s = 0; s < kStages; ++s) loader.load(s);

  float const scale = p.index_scale == nullptr ? 1.f : *p.index_scale;
  Queries<kTiles> queries{};
  bool opens_request = true;
  int stage = 0;
  int32_t unwritten = cursor.block();
  // The first turn is a rehearsal on whatever lies there, which brings the code into the caches
  // while the previous kernel ends.
  for (int32_t page = begin - 1; page < end; ++page) {
    DecodeRequest const& request = cursor.request();
    int32_t const block = cursor.block();
    bool const rehearses = page < begin;
    if (opens_request && !rehearses) {
      load_queries<C>(p, request, queries);
      if constexpr (std::is_same_v<C, E4m3>) queries_to_half(scale, queries);
    }
    if (!rehearses) wait_copies<kStages - 1>();
    __syncwarp();  // the slice is complete
    float best[2 * kTiles];
    score_slice<C>(rehearses ? idle : ring + stage * Slices<C>::BYTES, queries, best);
    scores.stage(block, best);
    if (rehearses) {
      loader.wait_for_previous();
      continue;
    }
    __syncwarp();  // and may be overwritten
    loader.load(stage);
    stage = stage + 1 == kStages ? 0 : stage + 1;
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
__global__ void __launch_bounds__(kThreads, 768 / kThreads)
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
  int32_t const position = request.position(token);
  int32_t const own = position < 0 ? -1 : position / kBlockSize;
  int32_t const visible = min(own + 1, p.tokens.max_pages);
  int32_t const low = p.init_blocks, high = min(visible, own - p.local_blocks + 1);
  int32_t const count = p.top_k - low - (visible - high);
  top_blocks::Contest const row{round.scores + blockIdx.x * round.score_stride, low, high, count};
  bool const competes = token < request.num_tokens && visible > p.top_k && count > 0;
  // A rehearsal on whatever lies there brings the code into the caches while scores are computed.
#pragma unroll 1
  for (int turn = blockIdx.x < round.rehearsals ? 0 : 1; turn < 2; ++turn) {
    if (turn == 1) wait_for_previous_kernel();
    if (competes) top_blocks::choose(row, shared);
  }

  int32_t const padding = p.tokens.num_tokens - max(num_real, first_decode);
  for (int32_t i = blockIdx.x; i < padding * heads; i += gridDim.x) {
    if (thread < p.top_k) ids(i % heads, p.tokens.num_tokens - 1 - i / heads)[thread] = -1;
  }
  if (token >= request.num_tokens || thread >= p.top_k) return;
  int32_t* const out = ids(head, request.first_token + token);
  if (visible <= p.top_k) {  // all of them, padding rows none
    out[thread] = thread < visible ? thread : -1;
    return;
  }
  // Ascending; the own block is the highest id there is.
  if (thread < low) out[thread] = thread;
  if (thread >= low + count) out[thread] = high + thread - (low + count);
  if (thread < count) out[low + top_blocks::place(shared, thread)] = shared.chosen[thread];
}

int64_t stride_of(int64_t max_pages) {
  return ceil_div(max_pages, 4) * 4;
}

struct Device {
  int processors, shared_bytes;
};

cudaError_t read_device(Device& device) {
  cudaError_t const error = count_processors(device.processors);
  if (error != cudaSuccess) return error;
  return read_attribute(device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
}

// Both kernels run under the same division of L1: changing it would empty the processors first.
cudaError_t ask_for_shared_memory(void const* kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

template <class C, int kTiles, int kStages>
cudaError_t launch_scores(BlockSelectParams const& p, Round const& round, Device const& device,
                          cudaStream_t stream) {
  constexpr int BYTES = (WARPS * kStages + 1) * Slices<C>::BYTES + Scores<kTiles>::BYTES;
  if (BYTES > device.shared_bytes) return cudaErrorInvalidConfiguration;
  auto* const kernel = score_pages_kernel<C, kTiles, kStages>;
  auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
  if (error != cudaSuccess) return error;
  error = ask_for_shared_memory(reinterpret_cast<void const*>(kernel));
  if (error != cudaSuccess) return error;
  return launch_behind(kernel, dim3(device.processors), dim3(32 * WARPS), BYTES, stream, p, round);
}

// 160 KB of keys on their way on GPUs that have the room, else 64 KB.
template <class C, int kTiles>
cudaError_t launch_scores(BlockSelectParams const& p, Round const& round, Device const& device,
                          cudaStream_t stream) {
  constexpr int PAGE_BYTES = WARPS * Slices<C>::BYTES;
  constexpr int MANY = 160 * 1024 / PAGE_BYTES, FEW = 64 * 1024 / PAGE_BYTES;
  return device.shared_bytes >= (MANY + 1) * PAGE_BYTES
             ? launch_scores<C, kTiles, MANY>(p, round, device, stream)
             : launch_scores<C, kTiles, FEW>(p, round, device, stream);
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
      p.init_blocks + p.local_blocks > p.top_k || p.num_decode_requests > p.tokens.num_requests ||
      p.num_decode_requests * p.decode_length > p.tokens.num_tokens) {
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
                      static_cast<uint32_t*>(workspace), stride,
                      2u * static_cast<uint32_t>(device.processors)};
    if (auto const error = launch_round(p, round, device, stream); error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace m3::kernels
