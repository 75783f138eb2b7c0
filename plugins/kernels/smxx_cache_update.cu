#include <type_traits>

#include "kernels/packed_tokens.cuh"
#include "kernels/smxx_cache_update.h"
#include "kernels/vectors.cuh"

namespace m3::kernels {
namespace {

constexpr int THREADS = 256;
constexpr int LANES = 16;               // of a head, eight channels each
constexpr int TEAMS = THREADS / LANES;  // heads at once
static_assert(kHeadSize == LANES * 8, "a team holds one head");

// A lane's eight channels of a head: four from `low` on and four from `high` on. Where the head
// turns, these are pairs, so that a lane needs no other.
struct Channels {
  int low, high;
  bool turn;

  __device__ Channels(int lane, int rotary_dim) {
    int const half = rotary_dim / 2;
    turn = 4 * lane < half;
    low = turn ? 4 * lane : half + 4 * lane + 4 * (lane - half / 4);
    high = turn ? low + half : low + 4;
  }
};

struct Eight {
  float4 low, high;
};

// As loaded: four elements.
template <class T>
using Quad = typename std::conditional<sizeof(T) == 4, float4, uint2>::type;

// What the heads of a token share.
struct Token {
  int32_t page;  // -1: no cache slot
  int32_t slot;
  bool padding;
};

template <int kTokens>
struct alignas(16) Shared {
  float cosine[kTokens][kHeadSize / 2];
  float sine[kTokens][kHeadSize / 2];
  Token tokens[kTokens];
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

__device__ float4 product(float4 a, float4 b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}

// RMS norm over the team, then the rotation.
__device__ Eight normalise_and_turn(Eight const& x, Eight const& weight, bool turn, float epsilon,
                                    float4 cosine, float4 sine) {
  float sum = dot4(x.low, x.low, dot4(x.high, x.high, 0.f));
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  float const factor = rsqrtf(sum / kHeadSize + epsilon);
  float4 const a = product(x.low * factor, weight.low);
  float4 const b = product(x.high * factor, weight.high);
  if (!turn) return {a, b};
  return {make_float4(a.x * cosine.x - b.x * sine.x, a.y * cosine.y - b.y * sine.y,
                      a.z * cosine.z - b.z * sine.z, a.w * cosine.w - b.w * sine.w),
          make_float4(b.x * cosine.x + a.x * sine.x, b.y * cosine.y + a.y * sine.y,
                      b.z * cosine.z + a.z * sine.z, b.w * cosine.w + a.w * sine.w)};
}

template <class T>
__device__ void store8(T* head, Channels const& at, Eight const& x) {
  store4(head + at.low, x.low);
  store4(head + at.high, x.high);
}

template <class T>
__device__ void write_cache(void* cache, int64_t row, Channels const& at, Eight const& x,
                            float const* scale) {
  if (scale == nullptr) {
    store8(static_cast<T*>(cache) + row * kHeadSize, at, x);
  } else {
    store8(static_cast<__nv_fp8_e4m3*>(cache) + row * kHeadSize, at,
           Eight{x.low / *scale, x.high / *scale});
  }
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
__device__ void write_head(CacheUpdateParams const& p, Heads const& heads, Token const& place,
                           int64_t token, int head, Channels const& at, Eight const& x) {
  if (head < heads.q_end) {
    store8(static_cast<T*>(p.q) + (token * p.num_heads + head) * kHeadSize, at, x);
  } else if (head >= heads.v_end && head < heads.index_q_end) {
    int64_t const row = token * p.num_index_heads + head - heads.v_end;
    store8(static_cast<T*>(p.index_q) + row * kHeadSize, at, x);
  } else if (place.page >= 0 && head < heads.v_end) {
    int const lane_of_cache = head < heads.k_end ? 0 : 1;  // 0 holds K, 1 holds V
    int const kv_head = head < heads.k_end ? head - heads.q_end : head - heads.k_end;
    int64_t const slot = (int64_t{place.page} * 2 + lane_of_cache) * kBlockSize + place.slot;
    write_cache<T>(p.kv_cache, slot * p.num_kv_heads + kv_head, at, x, p.kv_scale);
  } else if (place.page >= 0) {
    write_cache<T>(p.index_cache, int64_t{place.page} * kBlockSize + place.slot, at, x,
                   p.index_scale);
  }
}

// Grid: (groups of kTokens tokens, parts of their heads). While a team turns one head of all
// tokens, its next head is on the way.
template <class T, int kTokens>
__global__ void __launch_bounds__(THREADS)
    cache_update_kernel(__grid_constant__ CacheUpdateParams const p) {
  static_assert(kTokens <= THREADS / 32, "a warp prepares a token");
  __shared__ Shared<kTokens> shared;
  int32_t const first_token = blockIdx.x * kTokens;
  int const num_tokens = min(kTokens, p.tokens.num_tokens - first_token);
  Heads const heads(p);
  Channels const at(threadIdx.x % LANES, p.rotary_dim);
  auto const* const qkv =
      static_cast<T const*>(p.qkv) + int64_t{first_token} * heads.count * kHeadSize;
  Quad<T> next[kTokens][2];
  auto const load = [&](int head) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (head >= heads.count || i >= num_tokens) continue;
      T const* const from = qkv + (int64_t{i} * heads.count + head) * kHeadSize;
      next[i][0] = *reinterpret_cast<Quad<T> const*>(from + at.low);
      next[i][1] = *reinterpret_cast<Quad<T> const*>(from + at.high);
    }
  };
  int const first = blockIdx.y * TEAMS, step = gridDim.y * TEAMS;
  load(first + threadIdx.x / LANES);
  if (int const warp = threadIdx.x / 32; warp < num_tokens) {
    prepare_token(p, first_token + warp, shared.tokens[warp], shared.cosine[warp],
                  shared.sine[warp]);
  }
  __syncthreads();

  // Both teams of a warp go round equally often: they meet in the sums of the norm.
  for (int base = first; base < heads.count; base += step) {
    int const head = base + threadIdx.x / LANES;
    Quad<T> current[kTokens][2];
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      current[i][0] = next[i][0];
      current[i][1] = next[i][1];
    }
    load(head + step);
    bool const is_value = head >= heads.k_end && head < heads.v_end;
    float const* const norm = head < heads.q_end         ? p.q_norm
                              : head < heads.v_end       ? p.k_norm
                              : head < heads.index_q_end ? p.index_q_norm
                                                         : p.index_k_norm;
    Eight const weight =
        head < heads.count ? Eight{load4(norm + at.low), load4(norm + at.high)} : Eight{};
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (i >= num_tokens) break;
      Eight x{load4(reinterpret_cast<T const*>(&current[i][0])),
              load4(reinterpret_cast<T const*>(&current[i][1]))};
      float4 cosine{}, sine{};
      if (at.turn) {
        cosine = load4(shared.cosine[i] + at.low);
        sine = load4(shared.sine[i] + at.low);
      }
      Eight const turned = normalise_and_turn(x, weight, at.turn, p.epsilon, cosine, sine);
      if (!is_value) x = turned;
      Token const place = shared.tokens[i];
      if (place.padding) x = Eight{};
      if (head < heads.count) {
        write_head<T>(p, heads, place, int64_t{first_token} + i, head, at, x);
      }
    }
  }
}

template <class T>
void launch(CacheUpdateParams const& p, cudaStream_t stream) {
  int const heads = Heads(p).count;
  int const tokens = p.tokens.num_tokens;
  // Few tokens: their heads spread over the GPU. Many: what a token's or a head's turn needs is
  // computed or read once for several.
  if (tokens < 512) {
    dim3 const grid(tokens, static_cast<unsigned>(ceil_div(heads, TEAMS)));
    cache_update_kernel<T, 1><<<grid, THREADS, 0, stream>>>(p);
  } else {
    constexpr int TOKENS = 4;
    cache_update_kernel<T, TOKENS>
        <<<static_cast<unsigned>(ceil_div(tokens, TOKENS)), THREADS, 0, stream>>>(p);
  }
}

}  // namespace

cudaError_t launch_cache_update(CacheUpdateParams const& p, cudaStream_t stream) {
  if (p.tokens.num_tokens == 0) return cudaSuccess;
  if (p.rotary_dim % 8 != 0 || p.rotary_dim > kHeadSize) return cudaErrorInvalidValue;
  switch (p.type) {
    case Type::kFloat32:
      launch<float>(p, stream);
      break;
    case Type::kBfloat16:
      launch<__nv_bfloat16>(p, stream);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace m3::kernels
