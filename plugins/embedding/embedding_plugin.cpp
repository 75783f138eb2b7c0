#include "embedding/embedding_plugin.h"

#include "common/creator.h"
#include "kernels/smxx_embedding.h"

namespace m3 {

using nvinfer1::DataType;
using nvinfer1::Dims;

namespace {

enum Input : int32_t { kIds, kWords, kPromptTable };

}  // namespace

TypeTable EmbeddingPlugin::types(int32_t num_inputs) const {
  M3_CHECK(num_inputs == 3, "%d inputs are connected; it takes 3", num_inputs);
  return {{"input_ids", "words", "prompt_table", "y"},
          {{DataType::kINT32, DataType::kBF16, DataType::kBF16, DataType::kBF16},
           {DataType::kINT32, DataType::kFLOAT, DataType::kFLOAT, DataType::kFLOAT}}};
}

void EmbeddingPlugin::output_shapes(nvinfer1::DimsExprs const* in, nvinfer1::DimsExprs* out,
                                    nvinfer1::IExprBuilder&) const {
  M3_CHECK(in[kWords].nbDims == 2, "words has %d dimensions; it takes [words, columns]",
           in[kWords].nbDims);
  out[0] = in[kWords];
  out[0].d[0] = in[kIds].d[0];
}

void EmbeddingPlugin::check_shapes(Shapes const& shapes) const {
  Dims const &words = shapes.in[kWords], &table = shapes.in[kPromptTable];
  dim(shapes.in[kIds], 1, 0, "input_ids");
  M3_CHECK(
      dim(words, 2, 0, "words") == attributes().vocab_size && words.d[1] > 0 && words.d[1] % 8 == 0,
      "words has shape %s; it takes [%d, a multiple of 8]", to_string(words).c_str(),
      attributes().vocab_size);
  M3_CHECK(dim(table, 2, 1, "prompt_table") == words.d[1],
           "prompt_table has shape %s and words %s; rows of both take the same length",
           to_string(table).c_str(), to_string(words).c_str());
}

void EmbeddingPlugin::enqueue_step(Step const& step) const {
  kernels::EmbeddingParams p{};
  p.ids = step.input<int32_t>(kIds);
  p.words = step.inputs[kWords];
  p.prompt = step.inputs[kPromptTable];
  p.out = step.outputs[0];
  p.num_tokens = step.in[kIds].dims.d[0];
  p.vocab_size = attributes().vocab_size;
  p.hidden = static_cast<int32_t>(step.in[kWords].dims.d[1]);
  p.type = kernel_type(step.in[kWords].type);
  check_launch(kernels::launch_embedding(p, step.stream), "embedding");
}

}  // namespace m3

M3_DEFINE_CREATOR(embedding, m3::EmbeddingPlugin)
