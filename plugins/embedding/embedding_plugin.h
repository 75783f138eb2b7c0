#pragma once

#include "common/plugin_base.h"

namespace m3 {

struct EmbeddingAttributes {
  int32_t vocab_size;
};

// Rows of the vocabulary, or, for ids from vocab_size on, of the step's prompt table.
class EmbeddingPlugin final : public PluginBase<EmbeddingPlugin, EmbeddingAttributes> {
 public:
  using PluginBase::PluginBase;

  static constexpr char const* kName = "M3Embedding";
  static constexpr FieldSpec<EmbeddingAttributes> kFields[] = {
      {"vocab_size", &EmbeddingAttributes::vocab_size, 1},
  };

  TypeTable types(int32_t num_inputs) const;
  void output_shapes(nvinfer1::DimsExprs const* in, nvinfer1::DimsExprs* out,
                     nvinfer1::IExprBuilder& builder) const;
  void check_shapes(Shapes const& shapes) const;
  void enqueue_step(Step const& step) const;
};

}  // namespace m3
