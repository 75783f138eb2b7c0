#pragma once

#include "common/plugin_base.h"

namespace m3 {

struct PagedAttentionAttributes {
  int32_t block_size;
  float softmax_scale;
};

// Causal attention over all pages of a request: the layers without an index branch.
class PagedAttentionPlugin final
    : public PluginBase<PagedAttentionPlugin, PagedAttentionAttributes> {
 public:
  using PluginBase::PluginBase;

  static constexpr char const* kName = "M3PagedAttention";
  static constexpr FieldSpec<PagedAttentionAttributes> kFields[] = {
      {"block_size", &PagedAttentionAttributes::block_size, 1},
      {"softmax_scale", &PagedAttentionAttributes::softmax_scale},
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
