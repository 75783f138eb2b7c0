#include "kernels/packs.cuh"
#include "kernels/programmatic_launch.cuh"
#include "kernels/smxx_embedding.h"

namespace m3::kernels {
namespace {

constexpr int THREADS = 256;
constexpr int PACKS = 3;  // of a thread, in flight together

// Grid: (tokens, parts of a row).
template <class T>
__global__ void __launch_bounds__(THREADS)
    embedding_kernel(__grid_constant__ EmbeddingParams const p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  int const packs = p.hidden / Pack<T>::SIZE;
  int32_t const id = p.ids[blockIdx.x];
  bool const is_word = id < p.vocab_size;
  auto const* table = static_cast<T const*>(is_word ? p.words : p.prompt);
  T const* const from = table + int64_t{is_word ? id : id - p.vocab_size} * p.hidden;
  T* const to = static_cast<T*>(p.out) + int64_t{blockIdx.x} * p.hidden;
  int const first = blockIdx.y * PACKS * THREADS + threadIdx.x;
  Pack<T> held[PACKS];
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    if (first + i * THREADS < packs) held[i] = load_once(from, first + i * THREADS);
  }
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    if (first + i * THREADS < packs) held[i].store(to, first + i * THREADS);
  }
}

template <class T>
cudaError_t launch(EmbeddingParams const& p, cudaStream_t stream) {
  int64_t const parts = ceil_div(p.hidden / Pack<T>::SIZE, PACKS * THREADS);
  dim3 const grid(static_cast<unsigned>(p.num_tokens), static_cast<unsigned>(parts));
  return launch_behind(embedding_kernel<T>, grid, dim3(THREADS), 0, stream, p);
}

}  // namespace

cudaError_t launch_embedding(EmbeddingParams const& p, cudaStream_t stream) {
  if (p.num_tokens == 0) return cudaSuccess;
  if (p.hidden <= 0 || p.hidden % 8 != 0) return cudaErrorInvalidValue;
  return launch_typed(p.type, [&](auto t) { return launch<decltype(t)>(p, stream); });
}

}  // namespace m3::kernels
