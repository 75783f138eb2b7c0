// The kernels around the layers behind C functions, for bench/norm.py: no TensorRT in between.
#include "kernels/smxx_add_rms_norm.h"
#include "kernels/smxx_embedding.h"

using namespace m3::kernels;

extern "C" {

int m3_bench_add_rms_norm(int64_t num_rows, int32_t hidden, void const* x, void const* residual,
                          float const* weight, int32_t const* rows, void* normed, void* sum,
                          cudaStream_t stream) {
  AddRmsNormParams p{};
  p.x = x;
  p.residual = residual;
  p.weight = weight;
  p.rows = rows;
  p.normed = normed;
  p.sum = sum;
  p.num_rows = num_rows;
  p.hidden = hidden;
  p.epsilon = 1e-6f;
  p.type = Type::kBfloat16;
  return launch_add_rms_norm(p, stream);
}

int m3_bench_embedding(int64_t num_tokens, int32_t vocab_size, int32_t hidden, int32_t const* ids,
                       void const* words, void const* prompt, void* out, cudaStream_t stream) {
  EmbeddingParams p{};
  p.ids = ids;
  p.words = words;
  p.prompt = prompt;
  p.out = out;
  p.num_tokens = num_tokens;
  p.vocab_size = vocab_size;
  p.hidden = hidden;
  p.type = Type::kBfloat16;
  return launch_embedding(p, stream);
}
}
