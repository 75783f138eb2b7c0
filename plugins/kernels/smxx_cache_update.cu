#include "kernels/packed_tokens.cuh"
#include "kernels/smxx_cache_update.h"
#include "kernels/vectors.cuh"

namespace m3::kernels {
namespace {

constexpr int kWarps = 8;
static_assert(kHeadSize == 32 * 4, "a warp holds one head, four channels a lane");

// The rotation of a lane's four channels, computed once a token and used by all its heads.
struct Rotation {
  float cosine[4];
  float sine[4];  // negated in the first half: out = x * cosine + partner * sine
  int partner_lane;
  bool active;  // channels from rotary_dim on pass through
};

__device__ Rotation make_rotation(CacheUpdateParams const& p, int32_t token, int lane) {
  Rotation r{};
  int const half = p.rotary_dim / 2;
  int const channel = 4 * lane;
  bool const first_half = channel < half;
  r.active = channel < p.rotary_dim;
  r.partner_lane = !r.active ? lane : first_half ? lane + half / 4 : lane - half / 4;
  if (!r.active) return r;
  float const position = static_cast<float>(p.position_ids[token]);  // exact below 2^24
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float const angle = position * p.inv_freq[channel % half + i];
    // Angles reach a million radians: the accurate sincosf, never the fast one.
    sincosf(angle, &r.sine[i], &r.cosine[i]);
    if (first_half) r.sine[i] = -r.sine[i];
  }
  return r;
}

__device__ float4 normalise(float4 x, float const* __restrict__ weight, float epsilon, int lane) {
  float const mean = warp_sum(dot4(x, x, 0.f)) / kHeadSize;
  float4 const w = load4(weight + 4 * lane);
  float4 const y = x * rsqrtf(mean + epsilon);
  return make_float4(y.x * w.x, y.y * w.y, y.z * w.z, y.w * w.w);
}

__device__ float4 rotate(float4 x, Rotation const& r) {
  // Every lane takes part in the shuffle; lanes that do not rotate read themselves.
  float4 const y =
      make_float4(__shfl_sync(~0u, x.x, r.partner_lane), __shfl_sync(~0u, x.y, r.partner_lane),
                  __shfl_sync(~0u, x.z, r.partner_lane), __shfl_sync(~0u, x.w, r.partner_lane));
  if (!r.active) return x;
  return make_float4(x.x * r.cosine[0] + y.x * r.sine[0], x.y * r.cosine[1] + y.y * r.sine[1],
                     x.z * r.cosine[2] + y.z * r.sine[2], x.w * r.cosine[3] + y.w * r.sine[3]);
}

template <class T>
__device__ void write_cache(void* cache, int64_t offset, float4 x, float const* scale) {
  if (scale == nullptr) {
    store4(static_cast<T*>(cache) + offset, x);
  } else {
    store4(static_cast<__nv_fp8_e4m3*>(cache) + offset, x / *scale);
  }
}

template <class T>
__global__ void __launch_bounds__(32 * kWarps) cache_update_kernel(CacheUpdateParams const p) {
  int32_t const token = blockIdx.x;
  int const lane = threadIdx.x;
  TokenPlace const place = locate_token(p.tokens, token);
  int const q_end = p.num_heads;
  int const k_end = q_end + p.num_kv_heads;
  int const v_end = k_end + p.num_kv_heads;
  int const index_q_end = v_end + p.num_index_heads;
  int const num_rows = index_q_end + (p.num_index_heads > 0 ? 1 : 0);

  Rotation rotation{};
  int32_t page = -1;
  if (!place.is_padding()) {
    rotation = make_rotation(p, token, lane);
    page = page_of(p.tokens, place.request, place.own_block());
  }
  int const slot = place.position % kBlockSize;
  T const* const qkv = static_cast<T const*>(p.qkv) + int64_t{token} * num_rows * kHeadSize;

  // A warp takes one head of the row after the other.
  for (int row = blockIdx.y * kWarps + threadIdx.y; row < num_rows; row += gridDim.y * kWarps) {
    bool const is_query = row < q_end || (row >= v_end && row < index_q_end);
    float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
    if (!place.is_padding()) {
      x = load4(qkv + row * kHeadSize + 4 * lane);
      if (row < k_end || row >= v_end) {
        float const* const weight = row < q_end         ? p.q_norm
                                    : row < k_end       ? p.k_norm
                                    : row < index_q_end ? p.index_q_norm
                                                        : p.index_k_norm;
        x = rotate(normalise(x, weight, p.epsilon, lane), rotation);
      }
    }
    if (is_query) {
      bool const is_main = row < q_end;
      T* const out = static_cast<T*>(is_main ? p.q : p.index_q);
      int const heads = is_main ? p.num_heads : p.num_index_heads;
      int const head = is_main ? row : row - v_end;
      store4(out + (int64_t{token} * heads + head) * kHeadSize + 4 * lane, x);
    } else if (page >= 0 && row < v_end) {
      int const lane_of_cache = row < k_end ? 0 : 1;  // 0 holds K, 1 holds V
      int const head = row < k_end ? row - q_end : row - k_end;
      int64_t const offset =
          (((int64_t{page} * 2 + lane_of_cache) * kBlockSize + slot) * p.num_kv_heads + head) *
          kHeadSize;
      write_cache<T>(p.kv_cache, offset + 4 * lane, x, p.kv_scale);
    } else if (page >= 0) {
      int64_t const offset = (int64_t{page} * kBlockSize + slot) * kHeadSize;
      write_cache<T>(p.index_cache, offset + 4 * lane, x, p.index_scale);
    }
  }
}

}  // namespace

cudaError_t launch_cache_update(CacheUpdateParams const& p, cudaStream_t stream) {
  if (p.tokens.num_tokens == 0) return cudaSuccess;
  if (p.rotary_dim % 8 != 0 || p.rotary_dim > kHeadSize) return cudaErrorInvalidValue;
  int const rows =
      p.num_heads + 2 * p.num_kv_heads + (p.num_index_heads > 0 ? p.num_index_heads + 1 : 0);
  // Few tokens: spread the heads over the GPU. Many: one block a token computes its angles once.
  int const row_blocks = p.tokens.num_tokens < 256 ? static_cast<int>(ceil_div(rows, kWarps)) : 1;
  dim3 const grid(p.tokens.num_tokens, row_blocks);
  dim3 const block(32, kWarps);
  switch (p.type) {
    case Type::kFloat32:
      cache_update_kernel<float><<<grid, block, 0, stream>>>(p);
      break;
    case Type::kBfloat16:
      cache_update_kernel<__nv_bfloat16><<<grid, block, 0, stream>>>(p);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace m3::kernels
