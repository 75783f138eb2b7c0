#include <algorithm>

#include "kernels/packed_tokens.cuh"
#include "kernels/packs.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/smxx_cache_update.h"

namespace m3::kernels {
namespace {

constexpr int THREADS = 256;
constexpr int LANES = 8;                // of a head, sixteen channels each
constexpr int TEAMS = THREADS / LANES;  // heads at once
constexpr int HALF = 8;                 // channels side by side
constexpr int MAX_TOKENS = 8;           // of a block
constexpr int64_t BLOCKS = 1024;        // enough to fill any GPU: more tokens share blocks
static_assert(kHeadSize == LANES * 2 * HALF, "a team holds one head");
static_assert(MAX_TOKENS <= THREADS / 32, "a warp prepares a token");

// A lane's sixteen channels of a head: eight from `low` on and eight from `high` on. Where the head
// turns, these are pairs, so that a lane needs no other. Neighbours have neighbouring channels.
struct Channels {
  int low, high;
  bool turn;

  __device__ Channels(int lane, int rotary_dim) {
    int const half = rotary_dim / 2;
    turn = HALF * lane < half;
    low = turn ? HALF * lane : half + HALF * lane;
    high = low + (turn ? half : (kHeadSize - rotary_dim) / 2);
  }
};

// Eight channels as stored.
template <class T>
struct Stored {
  static constexpr int PACKS = HALF / Pack<T>::SIZE;
  Pack<T> packs[PACKS];

  __device__ void load(T const* from) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) packs[i] = load_once(from, i);
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
    Pack<T>::of(part).store(to, i);
  }
}

__device__ void store(__nv_fp8_e4m3* to, float const (&x)[HALF]) {
  __nv_fp8x4_e4m3 const fours[] = {__nv_fp8x4_e4m3(make_float4(x[0], x[1], x[2], x[3])),
                                   __nv_fp8x4_e4m3(make_float4(x[4], x[5], x[6], x[7]))};
  *reinterpret_cast<uint2*>(to) = make_uint2(fours[0].__x, fours[1].__x);
}

// What the heads of a token share.
struct Token {
  int32_t page;  // -1: no cache slot
  int32_t slot;
  bool padding;
};

enum Norm : int { kQ, kK, kIndexQ, kIndexK, kNorms };

struct Shared {
  alignas(16) float cosine[MAX_TOKENS][kHeadSize / 2];
  alignas(16) float sine[MAX_TOKENS][kHeadSize / 2];
  alignas(16) float norms[kNorms][kHeadSize];
  Token tokens[MAX_TOKENS];
};

// One warp.
__device__ void prepare_token(CacheUpdateParams const& p, int32_t token, Token& place,
                              float* cosine, float* sine) {
  int const lane = threadIdx.x % 32;
  float const position = static_cast<float>(p.position_ids[token]);  // exact below 2^24
  for (int i = lane; i < p.rotary_dim / 2; i += 32) {
    // Angles reach a million radians: the accurate sincosf, never the fast one.
    sincosf(position * p.inv_freq[i], &sine[i], &cosine[i]);
  }
  if (lane != 0) return;
  TokenPlace const at = locate_token(p.tokens, token);
  place = {at.is_padding() ? -1 : page_of(p.tokens, at.request, at.own_block()),
           at.position % kBlockSize, at.is_padding()};
}

// Heads of a token's row of qkv, in order: q, k, v, index q, index k.
struct Heads {
  int q_end, k_end, v_end, index_q_end, count;

  __host__ __device__ explicit Heads(CacheUpdateParams const& p)
      : q_end(p.num_heads),
        k_end(q_end + p.num_kv_heads),
        v_end(k_end + p.num_kv_heads),
        index_q_end(v_end + p.num_index_heads),
        count(index_q_end + (p.num_index_heads > 0 ? 1 : 0)) {}
};

template <class T>
__device__ void store_head(T* head, Channels const& at, float const (&low)[HALF],
                           float const (&high)[HALF]) {
  store(head + at.low, low);
  store(head + at.high, high);
}

template <class T>
__device__ void write_cache(void* cache, int64_t row, Channels const& at, float (&low)[HALF],
                            float (&high)[HALF], float const* scale) {
  if (scale == nullptr) {
    store_head(static_cast<T*>(cache) + row * kHeadSize, at, low, high);
    return;
  }
#pragma unroll
  for (int i = 0; i < HALF; ++i) {
    low[i] /= *scale;
    high[i] /= *scale;
  }
  store_head(static_cast<__nv_fp8_e4m3*>(cache) + row * kHeadSize, at, low, high);
}

template <class T>
__device__ void write_head(CacheUpdateParams const& p, Heads const& heads, Token const& place,
                           int64_t token, int head, Channels const& at, float (&low)[HALF],
                           float (&high)[HALF]) {
  if (head < heads.q_end) {
    store_head(static_cast<T*>(p.q) + (token * p.num_heads + head) * kHeadSize, at, low, high);
  } else if (head >= heads.v_end && head < heads.index_q_end) {
    int64_t const row = token * p.num_index_heads + head - heads.v_end;
    store_head(static_cast<T*>(p.index_q) + row * kHeadSize, at, low, high);
  } else if (place.page >= 0 && head < heads.v_end) {
    int const lane_of_cache = head < heads.k_end ? 0 : 1;  // 0 holds K, 1 holds V
    int const kv_head = head < heads.k_end ? head - heads.q_end : head - heads.k_end;
    int64_t const slot = (int64_t{place.page} * 2 + lane_of_cache) * kBlockSize + place.slot;
    write_cache<T>(p.kv_cache, slot * p.num_kv_heads + kv_head, at, low, high, p.kv_scale);
  } else if (place.page >= 0) {
    write_cache<T>(p.index_cache, int64_t{place.page} * kBlockSize + place.slot, at, low, high,
                   p.index_scale);
  }
}

// Eight floats of shared memory.
__device__ void read(float const* from, float (&x)[HALF]) {
#pragma unroll
  for (int i = 0; i < HALF; i += 4) {
    float4 const four = *reinterpret_cast<float4 const*>(from + i);
    x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
  }
}

// RMS norm over the team, then the rotation.
__device__ void normalise_and_turn(float (&low)[HALF], float (&high)[HALF], float const* weight,
                                   Channels const& at, float epsilon, float const* cosine,
                                   float const* sine) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < HALF; ++i) sum = fmaf(low[i], low[i], fmaf(high[i], high[i], sum));
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  float const factor = rsqrtf(sum / kHeadSize + epsilon);
  float a[HALF], b[HALF];
  read(weight + at.low, a);
  read(weight + at.high, b);
#pragma unroll
  for (int i = 0; i < HALF; ++i) {
    low[i] *= factor * a[i];
    high[i] *= factor * b[i];
  }
  if (!at.turn) return;
  read(cosine + at.low, a);
  read(sine + at.low, b);
#pragma unroll
  for (int i = 0; i < HALF; ++i) {
    float const x = low[i], y = high[i];
    low[i] = x * a[i] - y * b[i];
    high[i] = y * a[i] + x * b[i];
  }
}

// Grid: (groups of tokens, parts of their heads). Teams go through the heads of all tokens of their
// block; while one is turned the next is on its way.
template <class T>
__global__ void __launch_bounds__(THREADS, sizeof(T) == 2 ? 4 : 2)
    cache_update_kernel(__grid_constant__ CacheUpdateParams const p, int tokens_per_block) {
  __shared__ Shared shared;
  let_next_kernel_start();
  wait_for_previous_kernel();
  int32_t const first_token = blockIdx.x * tokens_per_block;
  int const num_tokens = min(tokens_per_block, p.tokens.num_tokens - first_token);
  Heads const heads(p);
  Channels const at(threadIdx.x % LANES, p.rotary_dim);
  int const rows = num_tokens * heads.count, step = gridDim.y * TEAMS;
  int const base = blockIdx.y * TEAMS, team = threadIdx.x / LANES;
  auto const* const qkv =
      static_cast<T const*>(p.qkv) + int64_t{first_token} * heads.count * kHeadSize;
  Stored<T> next[2];
  auto const load = [&](int row) {
    if (row >= rows) return;
    next[0].load(qkv + int64_t{row} * kHeadSize + at.low);
    next[1].load(qkv + int64_t{row} * kHeadSize + at.high);
  };
  load(base + team);
  if (int const warp = threadIdx.x / 32; warp < num_tokens) {
    prepare_token(p, first_token + warp, shared.tokens[warp], shared.cosine[warp],
                  shared.sine[warp]);
  }
  float const* const norms[kNorms] = {p.q_norm, p.k_norm, p.index_q_norm, p.index_k_norm};
#pragma unroll
  for (int i = 0; i < kNorms; ++i) {
    if (norms[i] != nullptr && threadIdx.x < kHeadSize) {
      shared.norms[i][threadIdx.x] = norms[i][threadIdx.x];
    }
  }
  __syncthreads();

  // All teams of a warp go round equally often: they meet in the sums of the norm.
  for (int i = base; i < rows; i += step) {
    int const row = i + team;
    float low[HALF], high[HALF];
    next[0].unpack(low);
    next[1].unpack(high);
    load(row + step);
    int const token = min(row, rows - 1) / heads.count, head = row - token * heads.count;
    Token const place = shared.tokens[token];
    bool const is_value = head >= heads.k_end && head < heads.v_end;
    int const norm = head < heads.q_end         ? kQ
                     : head < heads.v_end       ? kK
                     : head < heads.index_q_end ? kIndexQ
                                                : kIndexK;
    float turned_low[HALF], turned_high[HALF];
#pragma unroll
    for (int j = 0; j < HALF; ++j) turned_low[j] = low[j], turned_high[j] = high[j];
    normalise_and_turn(turned_low, turned_high, shared.norms[norm], at, p.epsilon,
                       shared.cosine[token], shared.sine[token]);
#pragma unroll
    for (int j = 0; j < HALF; ++j) {
      low[j] = place.padding ? 0.f : is_value ? low[j] : turned_low[j];
      high[j] = place.padding ? 0.f : is_value ? high[j] : turned_high[j];
    }
    if (row < rows) {
      write_head<T>(p, heads, place, int64_t{first_token} + token, head, at, low, high);
    }
  }
}

template <class T>
cudaError_t launch(CacheUpdateParams const& p, cudaStream_t stream) {
  int64_t const tokens = p.tokens.num_tokens;
  // Few tokens: their heads spread over the GPU. Many: several share what a block prepares.
  int64_t const each = std::clamp<int64_t>(tokens / BLOCKS, 1, MAX_TOKENS);
  int64_t const parts = tokens < BLOCKS / 2 ? ceil_div(Heads(p).count, TEAMS) : 1;
  dim3 const grid(static_cast<unsigned>(ceil_div(tokens, each)), static_cast<unsigned>(parts));
  return launch_behind(cache_update_kernel<T>, grid, dim3(THREADS), 0, stream, p,
                       static_cast<int>(each));
}

}  // namespace

cudaError_t launch_cache_update(CacheUpdateParams const& p, cudaStream_t stream) {
  if (p.tokens.num_tokens == 0) return cudaSuccess;
  if (p.rotary_dim % 16 != 0 || p.rotary_dim > kHeadSize) return cudaErrorInvalidValue;
  return launch_typed(p.type, [&](auto t) { return launch<decltype(t)>(p, stream); });
}

}  // namespace m3::kernels
