#include <algorithm>
#include <type_traits>

#include "kernels/arriving_ids.cuh"
#include "kernels/decode_select_slices.cuh"
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
constexpr int LONG_ROW = 2048;  // blocks

// ---- Scores. A block of threads takes an equal piece of the line.

constexpr int STEPS = kHeadSize / 16;  // channels of one product

// The queries of a request as the other operand: column = token * Hi + head. Up to four of them
// stand twice, in columns 0 to 3 for keys of even rows and in 4 to 7 for those of odd rows, which
// read their chunks in the other order.
template <int kColumns>
struct Queries {
  static constexpr bool TWICE = kColumns == 4;
  static constexpr int TILES = TWICE ? 1 : kColumns / 8;

  uint32_t pairs[TILES][STEPS][2];
  float factor[TILES][2];  // e4m3: what makes real scores of the sums
};

// Which channels meet in a product is free, as long as keys and queries agree. So a lane takes 16
// bytes of neighbouring channels of a key at once, chunk 4 i + lane % 4, and the same of a query.
// Through L1: all warps of the GPU want the same few lines when the batch is small.
template <class C, int kColumns>
__device__ void load_queries(BlockSelectParams const& p, int32_t first_token, int32_t num_tokens,
                             Queries<kColumns>& q) {
  using Q = Queries<kColumns>;
  constexpr int SHARE = 2 / sizeof(C);  // of a chunk's keys that 16 bytes of queries face
  int const lane = threadIdx.x % 32;
  auto const* const first =
      static_cast<Bf16 const*>(p.index_q) + int64_t{first_token} * p.num_index_heads * kHeadSize;
#pragma unroll
  for (int n = 0; n < Q::TILES; ++n) {
    int const column = Q::TWICE ? lane / 4 % 4 : n * 8 + lane / 4;
    int const other = Q::TWICE ? lane / 16 : 0;
    bool const valid = column < num_tokens * p.num_index_heads;
    auto const* const from = reinterpret_cast<uint4 const*>(first + column * kHeadSize);
#pragma unroll
    for (int i = 0; i < STEPS / 2; ++i) {
      uint4 four{};
      if (valid) four = from[((i / SHARE ^ other) * 4 + lane % 4) * SHARE + i % SHARE];
      q.pairs[n][2 * i][0] = four.x, q.pairs[n][2 * i][1] = four.y;
      q.pairs[n][2 * i + 1][0] = four.z, q.pairs[n][2 * i + 1][1] = four.w;
    }
  }
}

__device__ float2 unpack_bf16(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

// e4m3 are f16 exactly, in one instruction. So queries become f16, times a power of two that brings
// the largest of a row below 2^15: what is down to 2^-32 of it stays exact.
template <int kColumns>
__device__ void queries_to_half(float scale, Queries<kColumns>& q) {
  int const lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < Queries<kColumns>::TILES; ++n) {
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

// best[2n + i]: the best score of columns 8n + 2 (lane % 4) + i among the lane's keys, those before
// included.
template <class C, int kColumns>
__device__ void score_slice(uint32_t slice, Queries<kColumns> const& q,
                            float (&best)[2 * Queries<kColumns>::TILES]) {
  constexpr bool TWICE = Queries<kColumns>::TWICE;
  constexpr int TILES = Queries<kColumns>::TILES;
  constexpr bool kWide = std::is_same_v<C, E4m3>;
  constexpr int ROW_BYTES = Slices<C>::ROW_BYTES;
  int const lane = threadIdx.x % 32;
  bool const odd = (lane & 4) != 0;
  uint32_t const from = slice + lane / 4 * ROW_BYTES + lane % 4 * 16;
#pragma unroll
  for (int keys = 0; keys < Slices<C>::KEYS; keys += 16) {
    float sums[TILES][2][4] = {};  // of the first and of the second chunk
#pragma unroll
    for (int pair = 0; pair < ROW_BYTES / 64; pair += 2) {
      // Rows lane / 4 and 8 below it. Every other row reads the second chunk first: two rows of the
      // same chunks would share their banks.
      uint32_t rows[2][2][4];
#pragma unroll
      for (int turn = 0; turn < 2; ++turn) {
        uint32_t const at = from + keys * ROW_BYTES + (pair + (odd ? 1 - turn : turn)) * 64;
        load_shared(rows[turn][0], at);
        load_shared(rows[turn][1], at + 8 * ROW_BYTES);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t upper[4], lower[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          upper[k] = !TWICE && odd ? rows[1 - half][0][k] : rows[half][0][k];
          lower[k] = !TWICE && odd ? rows[1 - half][1][k] : rows[half][1][k];
        }
        constexpr int PRODUCTS = kWide ? 4 : 2;
#pragma unroll
        for (int j = 0; j < PRODUCTS; ++j) {
          uint32_t a[4];
          if constexpr (kWide) {
            a[0] = e4m3_to_half(upper[j] & 0xffff), a[1] = e4m3_to_half(lower[j] & 0xffff);
            a[2] = e4m3_to_half(upper[j] >> 16), a[3] = e4m3_to_half(lower[j] >> 16);
          } else {
            a[0] = upper[2 * j], a[1] = lower[2 * j];
            a[2] = upper[2 * j + 1], a[3] = lower[2 * j + 1];
          }
#pragma unroll
          for (int n = 0; n < TILES; ++n) {
            uint32_t const(&b)[2] = q.pairs[n][(pair + half) * PRODUCTS + j];
            if constexpr (kWide) {
              multiply_add_half(sums[n][half], a, b[0], b[1]);
            } else {
              multiply_add(sums[n][half], a, b[0], b[1]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float upper = sums[n][0][i] + sums[n][1][i], lower = sums[n][0][i + 2] + sums[n][1][i + 2];
        if constexpr (kWide) upper *= q.factor[n][i], lower *= q.factor[n][i];
        best[2 * n + i] = fmaxf(fmaxf(best[2 * n + i], upper), lower);  // drops a NaN
      }
    }
  }
}

// Scores of a batch of pages on their way to memory. A score is 4 bytes and its row continues with
// the next block: single ones would cost the memory more than the keys' last percents.
template <int kColumns>
struct Scores {
  static constexpr bool TWICE = Queries<kColumns>::TWICE;
  static constexpr int TILES = Queries<kColumns>::TILES;
  static constexpr int PAGES = 256 / TILES;  // of a batch
  static constexpr int PITCH = PAGES + 1;
  static constexpr int WORDS = kColumns * PITCH;

  uint32_t* staged;  // [columns, pages], 0 before

  __device__ void clear() const {
    for (int i = threadIdx.x; i < WORDS; i += THREADS) staged[i] = 0;
  }

  // The maximum over the lanes that hold other keys, and over all warps. In each round a lane
  // passes on half of its values and keeps the others.
  __device__ void add(int32_t page, float (&x)[2 * TILES]) const {
    int const lane = threadIdx.x % 32;
    if constexpr (TWICE) return add_rows_of(page, x);
    int first = 0, copies = 0;
#pragma unroll
    for (int offset = 16; offset >= 4; offset /= 2) {
      int const half = TILES * offset / 16;
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
    for (int i = 0; i < (TILES + 3) / 4; ++i) {
      int const column = (first + i) / 2 * 8 + lane % 4 * 2 + (first + i) % 2;
      atomicMax(staged + column * PITCH + page, ordered_score(x[i]));
    }
  }

 private:
  // Even rows have their scores in columns 0 to 3, odd ones in 4 to 7.
  __device__ void add_rows_of(int32_t page, float (&x)[2]) const {
    int const lane = threadIdx.x % 32;
    bool const upper = (lane & 16) != 0;
    float best = upper ? x[1] : x[0];
    best = fmaxf(best, __shfl_xor_sync(~0u, upper ? x[0] : x[1], 16));
    best = fmaxf(best, __shfl_xor_sync(~0u, best, 8));
    bool const odd_row = (lane & 4) != 0, odd_column = (lane & 2) != 0;
    if ((lane & 8) != 0 || odd_row != odd_column) return;
    int const column = lane % 2 * 2 + (upper ? 1 : 0);
    atomicMax(staged + column * PITCH + page, ordered_score(best));
  }
};

// Which scores a warp writes: those of its column and every `columns`-th one from there on, there
// its lane's and every `lanes`-th one from there on.
struct Turn {
  int column, columns, lane, lanes;

  __device__ static Turn alone() { return {0, 1, static_cast<int>(threadIdx.x) % 32, 32}; }
  __device__ static Turn among_warps(int row_warps) {
    int const warp = threadIdx.x / 32, lanes = 32 << row_warps;
    return {warp >> row_warps, WARPS >> row_warps, static_cast<int>(threadIdx.x) & (lanes - 1),
            lanes};
  }
};

// Calls write(word, column, page) with the word of every score of the pages [begin, end) that it is
// the warp's turn for.
template <class Table, class F>
__device__ void for_each_score(Table const& table, BlockSelectParams const& p, Round const& round,
                               int32_t begin, int32_t end, Turn const& turn, F const& write) {
#pragma unroll 1
  for (int32_t i = begin + turn.lane; i < end; i += turn.lanes) {
    Page const page = table[i];
    int const rows = num_tokens_of(page.request()) * p.num_index_heads;
#pragma unroll 1
    for (int c = turn.column; c < rows; c += turn.columns) {
      write(round.scores[page.row + c * round.score_stride], c, i);
    }
  }
}

// Whether a row gets 512 threads.
__host__ __device__ bool is_wide(int32_t rows, int32_t max_pages, int32_t processors) {
  return rows <= processors / 2 && max_pages > LONG_ROW;
}

// Either the selection starts when the scores' blocks do and waits for their end, or it starts when
// no old score is left and waits for each new one. The latter is quicker where scoring takes longer
// than the start of a kernel, unless so many selections wait, or each for so many scores, that they
// disturb the scores.
__device__ bool selects_behind(BlockSelectParams const& p, Round const& round, int32_t pages) {
  int32_t const rows = round.count * p.decode_length * p.num_index_heads;
  bool const few =
      rows <= 2 * round.processors && (pages <= int64_t{round.count} * LONG_ROW ||
                                       is_wide(rows, p.tokens.max_pages, round.processors));
  return pages <= round.processors || pages > (few ? 64 : 32) * round.processors;
}

// The row that this block of the scores marks (arriving_ids.cuh), if any.
__device__ int32_t* row_to_mark(BlockSelectParams const& p, Round const& round) {
  int32_t const rows = round.count * p.decode_length * p.num_index_heads;
  if (round.count != p.num_decode_requests || rows > static_cast<int32_t>(gridDim.x) ||
      static_cast<int32_t>(blockIdx.x) >= rows) {
    return nullptr;
  }
  auto const row = SelectedRow::at(p, round, static_cast<int32_t>(blockIdx.x));
  return row.exists() ? row.ids(p) : nullptr;
}

// The kernel in front may have yet to write them.
__device__ void prefetch_queries(BlockSelectParams const& p, uint32_t request) {
  int32_t const row = p.num_index_heads * kHeadSize, i = threadIdx.x * 64;
  if (i < num_tokens_of(request) * row) {
    prefetch(static_cast<Bf16 const*>(p.index_q) + int64_t{first_token_of(request)} * row + i);
  }
}

// Grid: as many blocks as the GPU runs at once.
template <class C, int kColumns, int kStages>
__global__ void __launch_bounds__(THREADS, kColumns <= 8 ? 2 : 1)
    score_pages_kernel(__grid_constant__ BlockSelectParams const p,
                       __grid_constant__ Round const round) {
  using S = Scores<kColumns>;
  using Ring = SliceRing<C, kStages, S::PAGES>;
  constexpr int OF_PAGE = Slices<C>::OF_PAGE;
  extern __shared__ __align__(128) uint8_t memory[];
  prefetch_tables(p, round);
  PageCursor cursor(p, round);
  int32_t const total = cursor.count_pages();
  bool const early = selects_behind(p, round, total);
  if (early) let_next_kernel_start();
  auto const blocks = static_cast<int32_t>(gridDim.x), block = static_cast<int32_t>(blockIdx.x);
  int32_t const each = total / blocks, longer = total % blocks;
  int32_t const begin = each * block + min(block, longer);
  int32_t const end = begin + each + (block < longer ? 1 : 0);
  if (begin == end) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    return;
  }
  using Table = PageTable<S::PAGES>;
  int const warp = threadIdx.x / 32;
  S const scores{reinterpret_cast<uint32_t*>(memory + WARPS * Ring::BYTES)};
  auto& shared = reinterpret_cast<typename Ring::Shared*>(scores.staged + S::WORDS)[warp];
  auto& table = *reinterpret_cast<Table*>(&shared + WARPS - warp);
  int32_t const pages = end - begin, pool_begin = pages - pool_of(pages, S::PAGES);
  int const spared = early ? 0 : CLEARING_SLICES;
  table.fill(cursor, begin, 0, min(pages, S::PAGES));
  if (threadIdx.x == 0) table.drawn = 0;
  Ring::initialize(shared);
  __syncthreads();
  Ring ring(p, table, pool_begin, pages, spared, memory + warp * Ring::BYTES, shared);
#pragma unroll 1
  for (int s = 0; s < kStages; ++s) ring.template load<true>(s);
  if (pages > S::PAGES) table.fill_later(p, round, begin, S::PAGES, min(pages, 2 * S::PAGES));
  scores.clear();
  __syncthreads();
  prefetch_queries(p, table[0].request());
  float const scale = p.index_scale == nullptr ? 1.f : *p.index_scale;
  int32_t* const marked = warp == CLEARING_WARP && !early ? row_to_mark(p, round) : nullptr;
  wait_for_previous_kernel();
  if (warp == CLEARING_WARP && !early) {
    int32_t const lane = threadIdx.x % 32;
    if (marked != nullptr && lane < p.top_k) marked[lane] = kIdToCome;
    for_each_score(table, p, round, 0, pages, Turn::alone(),
                   [](uint32_t& word, int, int32_t) { word = 0; });
    __threadfence();
    __syncwarp();
    let_next_kernel_start();
  }

  Queries<kColumns> queries{};
  uint32_t request = 0;
  int32_t open = -1;
  bool missing = false;
  int stage = 0, turn = 0;
  float best[2 * S::TILES];
#pragma unroll
  for (float& x : best) x = -INFINITY;
  // Two slices at once, for which a warp waits less: where most slices are loaded before they can
  // be scored. Longer pieces wait for their loads, which twos would start later.
  bool const in_twos = kColumns <= 8 && pages > 2 && pages == pool_begin;
  auto const open_page = [&](int32_t page) {
    if (page == open) return;
    open = page;
    Page const& opened = table[page];
    missing = opened.id < 0;
    if (opened.request() != request) {
      request = opened.request();
      load_queries<C>(p, first_token_of(request), num_tokens_of(request), queries);
      if constexpr (std::is_same_v<C, E4m3>) queries_to_half(scale, queries);
    }
  };
#pragma unroll 1
  for (int32_t batch = 0; batch < pages; batch += S::PAGES) {
    int32_t const batch_end = min(batch + S::PAGES, pages);
    if (batch + 2 * S::PAGES < pages) {
      table.fill_later(p, round, begin, batch + 2 * S::PAGES, min(pages, batch + 3 * S::PAGES));
    }
    Share share = Share::of(batch, min(batch_end, pool_begin), OF_PAGE, spared);
#pragma unroll 1
    while (in_twos && share.next != share.last) {
      open_page(share.next / OF_PAGE);
      ring.wait(stage, turn);
      int const next = stage + 1 == kStages ? 0 : stage + 1;
      bool const two = share.next % 2 == 0 && share.last - share.next > 1;
      if (two) ring.wait(next, next == 0 ? turn + 1 : turn);
      if (!missing) {  // one alone twice, its maximum stays
        score_slice<C>(ring.slice(stage), queries, best);
        score_slice<C>(ring.slice(two ? next : stage), queries, best);
      }
      __syncwarp();  // the slices may be overwritten
#pragma unroll 1
      for (int32_t const end = share.next + (two ? 2 : 1); share.next < end; ++share.next) {
        ring.template load<true>(stage);
        if (++stage == kStages) stage = 0, ++turn;
      }
      if (share.next % OF_PAGE != 0 && share.next != share.last) continue;
      scores.add((share.next - 1) / OF_PAGE, best);
#pragma unroll
      for (float& x : best) x = -INFINITY;
    }
#pragma unroll 1
    for (;;) {
      bool const drawn = share.next == share.last;
      if (drawn && (batch_end < pages || !ring.has_drawn())) break;
      if (drawn) ring.wait(stage, turn);
      int32_t const page = (drawn ? ring.drawn(stage) : share.next) / OF_PAGE;
      open_page(page);
      ring.wait(stage, turn);
      if (!missing) score_slice<C>(ring.slice(stage), queries, best);
      __syncwarp();  // the slice may be overwritten
      ring.load(stage);
      if (++stage == kStages) stage = 0, ++turn;
      if (drawn) {
        ring.finish_drawn();
      } else if (++share.next % OF_PAGE != 0 && share.next != share.last) {
        continue;
      }
      scores.add(page - batch, best);
#pragma unroll
      for (float& x : best) x = -INFINITY;
    }
    __syncthreads();  // staged
    for_each_score(table, p, round, batch, batch_end, Turn::among_warps(round.row_warps),
                   [&](uint32_t& word, int column, int32_t page) {
                     uint32_t& staged = scores.staged[column * S::PITCH + page - batch];
                     word = staged;
                     staged = 0;
                   });
    if (batch_end < pages) __syncthreads();  // read
  }
}

// ---- Selection: a block of threads for each (request, token, index head).

template <int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads <= 256 ? 512 / kThreads : 1)
    select_pages_kernel(__grid_constant__ BlockSelectParams const p,
                        __grid_constant__ Round const round) {
  __shared__ top_blocks::Shared<kThreads> shared;
  let_next_kernel_start();
  int const thread = threadIdx.x;
  auto const selected = SelectedRow::at(p, round, static_cast<int32_t>(blockIdx.x));
  DecodeRequest const& request = selected.request;
  int32_t const num_real = p.tokens.cu_query_lens[p.tokens.num_requests];
  int32_t const first_decode = p.tokens.num_tokens - p.num_decode_requests * p.decode_length;
  int32_t const position = request.position(selected.token);
  int32_t const own = position < 0 ? -1 : position / kBlockSize;
  int32_t const visible = min(own + 1, p.tokens.max_pages);
  int32_t const low = p.init_blocks, high = min(visible, own - p.local_blocks + 1);
  int32_t const count = p.top_k - low - (visible - high);
  top_blocks::Contest const row{round.scores + blockIdx.x * round.score_stride, low, high, count};
  bool const competes = selected.exists() && visible > p.top_k && count > 0;
  bool const behind = selects_behind(p, round, PageCursor(p, round).count_pages());
  if (behind) wait_for_previous_kernel();
  int32_t const padding = p.tokens.num_tokens - max(num_real, first_decode);
  for (int32_t i = blockIdx.x; i < padding * p.num_index_heads; i += gridDim.x) {
    int64_t const row =
        int64_t{i % p.num_index_heads + 1} * p.tokens.num_tokens - 1 - i / p.num_index_heads;
    if (thread < p.top_k) p.block_ids[row * p.top_k + thread] = -1;
  }
  if (competes) top_blocks::choose(row, shared);

  if (selected.exists() && thread < p.top_k) {
    int32_t* const out = selected.ids(p);
    if (visible <= p.top_k) {  // all of them, padding rows none
      out[thread] = thread < visible ? thread : -1;
    } else {  // ascending; the own block is the highest id there is
      if (thread < low) out[thread] = thread;
      if (thread >= low + count) out[thread] = high + thread - (low + count);
      if (thread < count)
        out[low + top_blocks::place(shared, count, thread)] = shared.chosen[thread];
    }
  }
  // The next kernel relies on the end of both.
  wait_for_previous_kernel();
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

template <class C, int kColumns, int kStages>
cudaError_t launch_scores(BlockSelectParams const& p, Round const& round, Device const& device,
                          cudaStream_t stream) {
  using Ring = SliceRing<C, kStages, Scores<kColumns>::PAGES>;
  constexpr int BYTES = WARPS * (Ring::BYTES + sizeof(typename Ring::Shared)) +
                        Scores<kColumns>::WORDS * 4 + sizeof(PageTable<Scores<kColumns>::PAGES>);
  if (BYTES > device.shared_bytes) return cudaErrorInvalidConfiguration;
  auto* const kernel = score_pages_kernel<C, kColumns, kStages>;
  auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES);
  if (error != cudaSuccess) return error;
  error = ask_for_shared_memory(reinterpret_cast<void const*>(kernel));
  if (error != cudaSuccess) return error;
  return launch_behind(kernel, dim3(device.processors), dim3(THREADS), BYTES, stream, p, round);
}

// 128 KB of keys on their way on GPUs that have the room, else 64 KB. More would leave none for the
// kernel behind.
template <class C, int kColumns>
cudaError_t launch_scores(BlockSelectParams const& p, Round const& round, Device const& device,
                          cudaStream_t stream) {
  return device.shared_bytes >= 160 * 1024
             ? launch_scores<C, kColumns, 4>(p, round, device, stream)
             : launch_scores<C, kColumns, 2>(p, round, device, stream);
}

template <class C>
cudaError_t launch_scores(BlockSelectParams const& p, Round const& round, Device const& device,
                          cudaStream_t stream) {
  int const columns = p.num_index_heads * p.decode_length;
  if (columns <= 4) return launch_scores<C, 4>(p, round, device, stream);
  if (columns <= 8) return launch_scores<C, 8>(p, round, device, stream);
  if (columns <= 16) return launch_scores<C, 16>(p, round, device, stream);
  if (columns <= 32) return launch_scores<C, 32>(p, round, device, stream);
  return launch_scores<C, 64>(p, round, device, stream);
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
  if (is_wide(rows, p.tokens.max_pages, device.processors)) {
    return launch_selection<512>(p, round, rows, stream);
  }
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
  int32_t row_warps = 0;
  while (p.decode_length * p.num_index_heads << (row_warps + 1) <= WARPS) ++row_warps;
  for (int32_t first = 0; first < p.num_decode_requests; first += step) {
    Round const round{first,
                      std::min(step, p.num_decode_requests - first),
                      static_cast<uint32_t*>(workspace),
                      stride,
                      device.processors,
                      row_warps};
    if (auto const error = launch_round(p, round, device, stream); error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace m3::kernels
