#include <algorithm>

#include "kernels/packed_tokens.cuh"
#include "kernels/packs.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/smxx_cache_update.h"

namespace m3::kernels {
namespace {

constexpr int THREADS = 256;
constexpr int LANES = 8;                // of a head, sixteen channels each: a team
constexpr int TEAMS = THREADS / LANES;  // heads at once
constexpr int HALF = 8;                 // channels side by side
constexpr int MAX_TOKENS = 16;          // of a block
constexpr int64_t MANY_HEADS = 160;     // of a block
constexpr int64_t FEW_TOKENS = 512;     // blocks that just fill a GPU
static_assert(kHeadSize == LANES * 2 * HALF, "a team holds one head");
static_assert(MAX_TOKENS <= 32, "a warp locates the tokens of a block");

// A lane's sixteen channels of a head: eight from `low` on and eight from `low + step` on. Where
// the head turns, these are pairs, so that a lane needs no other. Neighbours have neighbouring
// channels.
struct Channels {
  int low, step;

  __device__ Channels(int lane, int rotary_dim) {
    int const half = rotary_dim / 2, from = HALF * lane;
    bool const turn = from < half;
    low = turn ? from : from + half;
    step = turn ? half : kHeadSize / 2 - half;
  }
};

enum Kind : int { kQ, kK, kV, kIndexQ, kIndexK, kKinds };

// Heads of a token's row of qkv, in order.
struct Heads {
  int q_end, k_end, v_end, index_q_end, count;

  __host__ __device__ explicit Heads(CacheUpdateParams const& p)
      : q_end(p.num_heads),
        k_end(q_end + p.num_kv_heads),
        v_end(k_end + p.num_kv_heads),
        index_q_end(v_end + p.num_index_heads),
        count(index_q_end + (p.num_index_heads > 0 ? 1 : 0)) {}

  __device__ int kind(int head) const {
    return (head >= q_end) + (head >= k_end) + (head >= v_end) + (head >= index_q_end);
  }
};

// What the heads of a token share.
struct Token {
  char* to[kKinds];  // of the row's first head, were it of this kind; null: nowhere
  bool padding;
};

// Both as the lanes of a team read them, four floats each: low, low + 4, high, high + 4 of a norm's
// weights, cosines (two) and sines (two) of a token's pairs.
struct Shared {
  alignas(16) float norms[kKinds][4][LANES][4];
  alignas(16) float angles[MAX_TOKENS][4][LANES][4];
  Token tokens[MAX_TOKENS];
};

__device__ void load_norm(float const* weight, int rotary_dim, float (&to)[4][LANES][4]) {
  int const part = threadIdx.x / 32, lane = threadIdx.x % 32 / 4, i = threadIdx.x % 4;
  if (weight == nullptr || part >= 4) return;
  Channels const at(lane, rotary_dim);
  to[part][lane][i] = weight[at.low + (part < 2 ? 0 : at.step) + part % 2 * 4 + i];
}

// All threads. Channels that do not turn get an angle of zero.
__device__ void prepare_angles(CacheUpdateParams const& p, int first_token, int num_tokens,
                               float (*to)[4][LANES][4]) {
  constexpr int PAIRS = kHeadSize / 2;
  for (int i = threadIdx.x; i < num_tokens * PAIRS; i += THREADS) {
    int const token = i / PAIRS, pair = i % PAIRS;
    float sine = 0.f, cosine = 1.f;
    if (pair < p.rotary_dim / 2) {
      // Angles reach a million radians: the accurate sincosf, never the fast one. Positions are
      // exact below 2^24.
      float const position = static_cast<float>(p.position_ids[first_token + token]);
      sincosf(position * p.inv_freq[pair], &sine, &cosine);
    }
    int const part = pair % HALF / 4, lane = pair / HALF;
    to[token][part][lane][pair % 4] = cosine;
    to[token][part + 2][lane][pair % 4] = sine;
  }
}

template <class T>
__device__ Token place_token(CacheUpdateParams const& p, Heads const& heads, int64_t token) {
  TokenPlace const at = locate_token(p.tokens, static_cast<int32_t>(token));
  int32_t const page = at.is_padding() ? -1 : page_of(p.tokens, at.request, at.own_block());
  int32_t const slot = at.position % kBlockSize;
  auto const address = [](void* base, int64_t head, float const* scale) {
    int64_t const bytes = kHeadSize * (scale == nullptr ? sizeof(T) : sizeof(__nv_fp8_e4m3));
    return static_cast<char*>(base) + head * bytes;
  };
  Token to{{}, at.is_padding()};
  to.to[kQ] = address(p.q, token * p.num_heads, nullptr);
  to.to[kIndexQ] = address(p.index_q, token * p.num_index_heads - heads.v_end, nullptr);
  if (page < 0) return to;
  int64_t const key = int64_t{page} * 2 * kBlockSize + slot, value = key + kBlockSize;
  to.to[kK] = address(p.kv_cache, key * p.num_kv_heads - heads.q_end, p.kv_scale);
  to.to[kV] = address(p.kv_cache, value * p.num_kv_heads - heads.k_end, p.kv_scale);
  int64_t const index_key = int64_t{page} * kBlockSize + slot;
  to.to[kIndexK] = address(p.index_cache, index_key - heads.index_q_end, p.index_scale);
  return to;
}

// Eight channels as stored. They are read for the last time, and what is stored below is not read
// soon: both leave the L2 cache before other data.
template <class T>
struct Stored {
  static constexpr int PACKS = HALF / Pack<T>::SIZE;
  Pack<T> packs[PACKS];

  __device__ void load(T const* from) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) packs[i] = {__ldcs(reinterpret_cast<uint4 const*>(from) + i)};
  }
  __device__ void unpack(float (&x)[HALF]) const {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      float part[Pack<T>::SIZE];
      packs[i].unpack(part);
#pragma unroll
      for (int j = 0; j < Pack<T>::SIZE; ++j) x[i * Pack<T>::SIZE + j] = part[j];
    }
  }
};

template <class T>
__device__ void store(T* to, float const (&x)[HALF]) {
  constexpr int SIZE = Pack<T>::SIZE;
#pragma unroll
  for (int i = 0; i < HALF / SIZE; ++i) {
    float part[SIZE];
#pragma unroll
    for (int j = 0; j < SIZE; ++j) part[j] = x[i * SIZE + j];
    __stcs(reinterpret_cast<uint4*>(to) + i, Pack<T>::of(part).bits);
  }
}

__device__ void store(__nv_fp8_e4m3* to, float const (&x)[HALF]) {
  __nv_fp8x4_e4m3 const fours[] = {__nv_fp8x4_e4m3(make_float4(x[0], x[1], x[2], x[3])),
                                   __nv_fp8x4_e4m3(make_float4(x[4], x[5], x[6], x[7]))};
  __stcs(reinterpret_cast<uint2*>(to), make_uint2(fours[0].__x, fours[1].__x));
}

// A lane's part of a head.
struct Part {
  float low[HALF], high[HALF];

  template <class T>
  __device__ void store_to(T* to, int step) const {
    store(to, low);
    store(to + step, high);
  }

  // Over the team.
  __device__ float sum_of_squares() const {
    float a = 0.f, b = 0.f;
#pragma unroll
    for (int i = 0; i < HALF; ++i) a = fmaf(low[i], low[i], a), b = fmaf(high[i], high[i], b);
    float sum = a + b;
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    return sum;
  }

  __device__ void scale(float const (*norm)[LANES][4], int lane, float factor) {
    float a[HALF], b[HALF];
    read(norm, lane, a);
    read(norm + 2, lane, b);
#pragma unroll
    for (int i = 0; i < HALF; ++i) low[i] *= factor * a[i], high[i] *= factor * b[i];
  }

  __device__ void divide(float by) {
#pragma unroll
    for (int i = 0; i < HALF; ++i) low[i] /= by, high[i] /= by;
  }

  __device__ void turn(float const (*angles)[LANES][4], int lane) {
    float cosine[HALF], sine[HALF];
    read(angles, lane, cosine);
    read(angles + 2, lane, sine);
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
      float const x = low[i], y = high[i];
      low[i] = x * cosine[i] - y * sine[i];
      high[i] = y * cosine[i] + x * sine[i];
    }
  }

 private:
  __device__ static void read(float const (*parts)[LANES][4], int lane, float (&x)[HALF]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float4 const four = *reinterpret_cast<float4 const*>(parts[i][lane]);
      x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
    }
  }
};

// Norm and rotation unless it is a value, and to where it belongs. `kScaled`: there are scales.
template <class T, bool kScaled>
__device__ void finish_head(CacheUpdateParams const& p, Shared const& shared, int token, int kind,
                            unsigned head, Channels const& at, int lane, Part& part,
                            float squares) {
  Token const& place = shared.tokens[token];
  char* const to = place.to[kind];
  if (to == nullptr) return;
  unsigned const first = head * kHeadSize + at.low;
  T* const out = reinterpret_cast<T*>(to + first * unsigned{sizeof(T)});
  if (place.padding) return Part{}.store_to(out, at.step);
  auto const turn = [&] {
    part.scale(shared.norms[kind], lane, rsqrtf(squares / kHeadSize + p.epsilon));
    part.turn(shared.angles[token], lane);
  };
  if constexpr (kScaled) {
    float const* const scale = kind == kK || kind == kV ? p.kv_scale
                               : kind == kIndexK        ? p.index_scale
                                                        : nullptr;
    if (scale != nullptr) {
      if (kind != kV) turn();
      part.divide(*scale);
      return part.store_to(reinterpret_cast<__nv_fp8_e4m3*>(to + first), at.step);
    }
  }
  if (kind == kV) return part.store_to(out, at.step);
  turn();
  part.store_to(out, at.step);
}

// Grid: (groups of tokens, parts of their heads). Teams go through the heads of all tokens of their
// block; while one is turned the next is on its way.
template <class T, bool kScaled>
__global__ void __launch_bounds__(THREADS, sizeof(T) == 2 ? 4 : 2)
    cache_update_kernel(__grid_constant__ CacheUpdateParams const p, int tokens_per_block) {
  __shared__ Shared shared;
  let_next_kernel_start();
  load_norm(p.q_norm, p.rotary_dim, shared.norms[kQ]);  // no kernel writes them
  load_norm(p.k_norm, p.rotary_dim, shared.norms[kK]);
  load_norm(p.index_q_norm, p.rotary_dim, shared.norms[kIndexQ]);
  load_norm(p.index_k_norm, p.rotary_dim, shared.norms[kIndexK]);

  Heads const heads(p);
  int const first_token = blockIdx.x * tokens_per_block;
  int const num_tokens = min(tokens_per_block, p.tokens.num_tokens - first_token);
  int const rows = num_tokens * heads.count, step = gridDim.y * TEAMS;
  int const lane = threadIdx.x % LANES;
  Channels const at(lane, p.rotary_dim);
  int row = blockIdx.y * TEAMS + threadIdx.x / LANES;
  T const* from = static_cast<T const*>(p.qkv) +
                  (int64_t{first_token} * heads.count + row) * kHeadSize + at.low;
  Stored<T> low, high;
  auto const load_head = [&] {
    if (row >= rows) return;
    low.load(from);
    high.load(from + at.step);
  };

  if (int const token = THREADS - 1 - static_cast<int>(threadIdx.x); token < num_tokens) {
    shared.tokens[token] = place_token<T>(p, heads, first_token + token);
  }
  prepare_angles(p, first_token, num_tokens, shared.angles);
  wait_for_previous_kernel();  // so far only inputs of the step were used
  load_head();
  __syncthreads();

  int token = row / heads.count, head = row % heads.count;
  int const token_step = step / heads.count, head_step = step % heads.count;
  // All teams of a warp go round equally often: they meet in the sums of the norm.
  for (int const ahead = threadIdx.x % 32 / LANES; row - ahead < rows;) {
    Part part;
    low.unpack(part.low);
    high.unpack(part.high);
    row += step, from += int64_t{step} * kHeadSize;
    load_head();
    float const squares = part.sum_of_squares();
    if (token < num_tokens) {
      finish_head<T, kScaled>(p, shared, token, heads.kind(head), head, at, lane, part, squares);
    }
    token += token_step, head += head_step;
    if (head >= heads.count) head -= heads.count, ++token;
  }
}

template <class T, bool kScaled>
cudaError_t launch(CacheUpdateParams const& p, cudaStream_t stream) {
  int64_t const tokens = p.tokens.num_tokens;
  int64_t const heads = Heads(p).count;
  // Few tokens: their heads spread over the GPU. Many: several share what a block prepares.
  int64_t const parts = tokens < FEW_TOKENS ? ceil_div(heads, TEAMS) : 1;
  int64_t each = 1;
  while (2 * each <= MAX_TOKENS && 2 * each * heads <= MANY_HEADS &&
         2 * each * FEW_TOKENS <= tokens) {
    each *= 2;
  }
  dim3 const grid(static_cast<unsigned>(ceil_div(tokens, each)), static_cast<unsigned>(parts));
  return launch_behind(cache_update_kernel<T, kScaled>, grid, dim3(THREADS), 0, stream, p,
                       static_cast<int>(each));
}

}  // namespace

cudaError_t launch_cache_update(CacheUpdateParams const& p, cudaStream_t stream) {
  if (p.tokens.num_tokens == 0) return cudaSuccess;
  if (p.rotary_dim % 16 != 0 || p.rotary_dim > kHeadSize) return cudaErrorInvalidValue;
  return launch_typed(p.type, [&](auto t) {
    bool const scaled = p.kv_scale != nullptr || p.index_scale != nullptr;
    return scaled ? launch<decltype(t), true>(p, stream) : launch<decltype(t), false>(p, stream);
  });
}

}  // namespace m3::kernels
