#pragma once

#include "common/plugin_base.h"

namespace m3 {

struct VarlenAttentionAttributes {
  float softmax_scale;
};

// q, k, v [N, heads, head_size] T, cu_seqlens int32 [segments + 1] -> [N, heads * head_size] T.
class VarlenAttentionPlugin final
    : public PluginBase<VarlenAttentionPlugin, VarlenAttentionAttributes> {
 public:
  using PluginBase::PluginBase;

  static constexpr char const* kName = "M3VarlenAttention";
  static constexpr FieldSpec<VarlenAttentionAttributes> kFields[] = {
      {"softmax_scale", &VarlenAttentionAttributes::softmax_scale, 0, 1e6},
  };

  TypeTable types(int32_t num_inputs) const;
  void output_shapes(nvinfer1::DimsExprs const* in, nvinfer1::DimsExprs* out,
                     nvinfer1::IExprBuilder& builder) const;
  void check_shapes(Shapes const& shapes) const;
  void enqueue_step(Step const& step) const;
};

}  // namespace m3
