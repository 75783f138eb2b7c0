#pragma once

#include "common/plugin_base.h"

namespace m3 {

struct SparseAttentionAttributes {
  int32_t block_size;
  float softmax_scale;
};

// Exact attention over the blocks that BlockSelect chose for each query and KV head.
class SparseAttentionPlugin final
    : public PluginBase<SparseAttentionPlugin, SparseAttentionAttributes> {
 public:
  using PluginBase::PluginBase;

  static constexpr char const* kName = "M3SparseAttention";
  static constexpr FieldSpec<SparseAttentionAttributes> kFields[] = {
      {"block_size", &SparseAttentionAttributes::block_size, 1},
      {"softmax_scale", &SparseAttentionAttributes::softmax_scale},
  };

  void check_attributes() const;
  TypeTable types(int32_t num_inputs) const;
  void output_shapes(nvinfer1::DimsExprs const* in, nvinfer1::DimsExprs* out,
                     nvinfer1::IExprBuilder& builder) const;
  void check_shapes(Shapes const& shapes) const;
  size_t workspace_bytes(Shapes const& largest) const;
  void enqueue_step(Step const& step) const;
};

}  // namespace m3
