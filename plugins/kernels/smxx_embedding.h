#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/types.h"

namespace m3::kernels {

struct EmbeddingParams {  // shapes: N tokens, V words, R prompt rows, H channels
  int32_t const* ids;     // [N]; from V on row id - V of the prompt table
  void const* words;      // T [V, H]
  void const* prompt;     // T [R, H]
  void* out;              // T [N, H]
  int64_t num_tokens;     // N
  int32_t vocab_size;     // V
  int32_t hidden;         // H, a multiple of 8
  Type type;              // T: fp32 or bf16
};

cudaError_t launch_embedding(EmbeddingParams const& p, cudaStream_t stream);

}  // namespace m3::kernels
