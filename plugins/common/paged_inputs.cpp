#include "common/paged_inputs.h"

#include <algorithm>

namespace m3 {

using nvinfer1::DataType;
using nvinfer1::Dims;

std::vector<std::string> const kPackedPorts = {"cu_query_lens", "sequence_length",
                                               "kv_cache_block_offsets"};

void check_packed(Shapes const& shapes, int32_t first) {
  Dims const& lengths = shapes.in[first + 1];
  Dims const& pages = shapes.in[first + 2];
  int64_t const requests = dim(lengths, 1, 0, "sequence_length");
  check_vector(shapes.in[first], requests + 1, "cu_query_lens");
  M3_CHECK(dim(pages, 2, 0, "kv_cache_block_offsets") == requests,
           "kv_cache_block_offsets has shape %s and sequence_length %s; the first dimensions must "
           "agree",
           to_string(pages).c_str(), to_string(lengths).c_str());
}

kernels::PackedTokens packed_tokens(Step const& step, int32_t first, int64_t num_tokens) {
  Dims const& pages = step.in[first + 2].dims;
  kernels::PackedTokens tokens{};
  tokens.cu_query_lens = step.input<int32_t>(first);
  tokens.sequence_length = step.input<int32_t>(first + 1);
  tokens.block_offsets = step.input<int32_t>(first + 2);
  tokens.num_requests = static_cast<int32_t>(pages.d[0]);
  tokens.num_tokens = static_cast<int32_t>(num_tokens);
  tokens.max_pages = static_cast<int32_t>(pages.d[1]);
  return tokens;
}

int64_t kv_heads(Dims const& kv_cache) {
  M3_CHECK(kv_cache.nbDims == 5 && kv_cache.d[1] == 2 && kv_cache.d[2] == kernels::kBlockSize &&
               kv_cache.d[3] >= 1 && kv_cache.d[4] == kernels::kHeadSize,
           "kv_cache has shape %s; it takes [pages, 2, %d, kv_heads, %d]",
           to_string(kv_cache).c_str(), kernels::kBlockSize, kernels::kHeadSize);
  return kv_cache.d[3];
}

void check_attention_heads(Dims const& q, Dims const& kv_cache) {
  int64_t const heads = kv_heads(kv_cache);
  M3_CHECK(q.nbDims == 3 && q.d[1] >= heads && q.d[1] % heads == 0 &&
               q.d[1] <= kernels::kMaxGroup * heads && q.d[2] == kernels::kHeadSize,
           "q has shape %s; with %lld KV heads it takes [tokens, 1 to %d times as many, %d]",
           to_string(q).c_str(), static_cast<long long>(heads), kernels::kMaxGroup,
           kernels::kHeadSize);
}

nvinfer1::DimsExprs attention_output(nvinfer1::DimsExprs const& q,
                                     nvinfer1::IExprBuilder& builder) {
  M3_CHECK(q.nbDims == 3, "q has %d dimensions; it takes 3", q.nbDims);
  nvinfer1::DimsExprs out{};
  out.nbDims = 2;
  out.d[0] = q.d[0];
  out.d[1] = builder.operation(nvinfer1::DimensionOperation::kPROD, *q.d[1], *q.d[2]);
  return out;
}

void check_index_cache(Dims const& index_cache) {
  M3_CHECK(index_cache.nbDims == 3 && index_cache.d[1] == kernels::kBlockSize &&
               index_cache.d[2] == kernels::kHeadSize,
           "index_cache has shape %s; it takes [pages, %d, %d]", to_string(index_cache).c_str(),
           kernels::kBlockSize, kernels::kHeadSize);
}

void check_decode_rows(Dims const& decode_rows) {
  M3_CHECK(decode_rows.nbDims == 2 && decode_rows.d[1] <= kernels::kMaxDecodeLength,
           "decode_rows has shape %s; it takes [requests, query tokens of each, up to %d]",
           to_string(decode_rows).c_str(), kernels::kMaxDecodeLength);
}

RowSplit split_rows(Dims const& decode_rows, kernels::PackedTokens const& tokens) {
  int64_t const requests = decode_rows.d[0], q_len = decode_rows.d[1];
  M3_CHECK(requests <= tokens.num_requests && requests * q_len <= tokens.num_tokens,
           "decode_rows has shape %s; the step has %d requests and %d tokens",
           to_string(decode_rows).c_str(), tokens.num_requests, tokens.num_tokens);
  RowSplit split{};
  split.num_decode = static_cast<int32_t>(requests);
  split.q_len = static_cast<int32_t>(q_len);
  split.context_requests = tokens.num_requests - split.num_decode;
  split.context_tokens = tokens.num_tokens - split.num_decode * split.q_len;
  return split;
}

bool splits_decode(DataType q, DataType kv_cache) {
  return q == DataType::kBF16 && (kv_cache == DataType::kBF16 || kv_cache == DataType::kFP8);
}

void check_vector(Dims const& dims, int64_t size, char const* name) {
  M3_CHECK(dim(dims, 1, 0, name) == size, "%s has shape %s; it takes [%lld]", name,
           to_string(dims).c_str(), static_cast<long long>(size));
}

void check_is_128(int32_t value, char const* op, char const* attribute) {
  static_assert(kernels::kBlockSize == 128 && kernels::kHeadSize == 128);
  M3_CHECK(value == 128, "%s: attribute '%s' is %d; there are kernels for 128 only", op, attribute,
           value);
}

TypeTable PortTypes::table(int32_t num_inputs) const {
  auto const caches = static_cast<int32_t>(
      std::count_if(inputs.begin(), inputs.end(), [](char c) { return c == 'K' || c == 'X'; }));
  auto const fixed = static_cast<int32_t>(inputs.size());
  int32_t const scales = num_inputs - fixed;
  M3_CHECK(scales >= 0 && scales <= caches,
           "%d inputs are connected; it takes %d, and one scale more for each e4m3 cache",
           num_inputs, fixed);

  TypeTable result;
  result.ports = input_names;
  for (int32_t i = 0; i < scales; ++i) {
    result.ports.push_back(scales == 1 ? "scale" : "scale " + std::to_string(i + 1));
  }
  result.ports.insert(result.ports.end(), output_names.begin(), output_names.end());
  for (DataType type : {DataType::kBF16, DataType::kFLOAT}) {
    for (bool const kv_e4m3 : {false, true}) {
      for (bool const index_e4m3 : {false, true}) {
        auto const type_of = [&](char port) {
          switch (port) {
            case 'T':
              return type;
            case 'K':
              return kv_e4m3 ? DataType::kFP8 : type;
            case 'X':
              return index_e4m3 ? DataType::kFP8 : type;
            case 'i':
              return DataType::kINT32;
            default:
              return DataType::kFLOAT;
          }
        };
        std::vector<DataType> row;
        for (char const port : inputs) row.push_back(type_of(port));
        // As many scales as e4m3 caches; a port that the op lacks counts for none.
        if (std::count(row.begin(), row.end(), DataType::kFP8) != scales) continue;
        row.insert(row.end(), scales, DataType::kFLOAT);
        for (char const port : outputs) row.push_back(type_of(port));
        if (std::find(result.rows.begin(), result.rows.end(), row) == result.rows.end()) {
          result.rows.push_back(row);
        }
      }
    }
  }
  return result;
}

float const* cache_scale(Step const& step, DataType type, int32_t position) {
  return type == DataType::kFP8 ? step.input<float>(position) : nullptr;
}

}  // namespace m3
