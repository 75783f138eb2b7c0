#pragma once

#include <string>
#include <vector>

#include "common/plugin_base.h"
#include "kernels/packed_tokens.h"

// The inputs that the paged ops share, and their checks.
namespace m3 {

// cu_query_lens, sequence_length and kv_cache_block_offsets stand side by side from input `first`.
constexpr int32_t kPackedInputs = 3;
extern std::vector<std::string> const kPackedPorts;

// Throws Error unless the three fit each other.
void check_packed(Shapes const& shapes, int32_t first);
kernels::PackedTokens packed_tokens(Step const& step, int32_t first, int64_t num_tokens);

// kv_cache [pages, 2, 128, Hkv, 128]: Hkv. Throws Error when it has another shape.
int64_t kv_heads(nvinfer1::Dims const& kv_cache);

// q [tokens, Hq, 128] with Hq a multiple of the cache's KV heads, up to 16 times as many. Throws
// Error.
void check_attention_heads(nvinfer1::Dims const& q, nvinfer1::Dims const& kv_cache);

// [tokens, Hq * 128]
nvinfer1::DimsExprs attention_output(nvinfer1::DimsExprs const& q, nvinfer1::IExprBuilder& builder);

// Throws Error unless index_cache is [pages, 128, 128].
void check_index_cache(nvinfer1::Dims const& index_cache);

// Throws Error unless decode_rows is [requests, up to 8].
void check_decode_rows(nvinfer1::Dims const& decode_rows);

// Context rows come first, decode rows last: what the shape of decode_rows says of a step.
struct RowSplit {
  int32_t num_decode;  // requests, the last ones, of q_len tokens each
  int32_t q_len;
  int32_t context_requests;
  int32_t context_tokens;  // padding included
};

// Throws Error when the step has fewer requests or tokens than decode_rows counts.
RowSplit split_rows(nvinfer1::Dims const& decode_rows, kernels::PackedTokens const& tokens);

// Whether launch_paged_decode serves the decode rows of these types.
bool splits_decode(nvinfer1::DataType q, nvinfer1::DataType kv_cache);

// Throws Error unless the input is [size].
void check_vector(nvinfer1::Dims const& dims, int64_t size, char const* name);

// Throws Error that names the attribute unless it is 128, the one size that kernels exist for.
void check_is_128(int32_t value, char const* op, char const* attribute);

// Types of an op's ports, spelled one letter each: T activations, i int32, f fp32, and K (KV cache)
// or X (index cache), which are T, or e4m3 where the cache's fp32 [1] scale is connected. The
// scales follow the other inputs, K's before X's; `num_inputs` counts them. Throws Error when it
// does not fit `inputs`.
struct PortTypes {
  std::vector<std::string> input_names;
  std::string inputs;
  std::vector<std::string> output_names;
  std::string outputs;

  TypeTable table(int32_t num_inputs) const;
};

// The scale of a cache, by position among the trailing scales; nullptr when `type` is not e4m3.
float const* cache_scale(Step const& step, nvinfer1::DataType type, int32_t position);

}  // namespace m3
