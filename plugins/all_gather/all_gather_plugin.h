#pragma once

#include "common/plugin_base.h"

namespace m3 {

struct AllGatherAttributes {
  int32_t group_size;
};

// x [n, w] T of each rank -> y [n, group_size * w], rank-major along the last axis.
class AllGatherPlugin final : public PluginBase<AllGatherPlugin, AllGatherAttributes> {
 public:
  using PluginBase::PluginBase;

  static constexpr char const* kName = "M3AllGather";
  static constexpr FieldSpec<AllGatherAttributes> kFields[] = {
      {"group_size", &AllGatherAttributes::group_size, 2, 1024},
  };

  TypeTable types(int32_t num_inputs) const;
  void output_shapes(nvinfer1::DimsExprs const* in, nvinfer1::DimsExprs* out,
                     nvinfer1::IExprBuilder& builder) const;
  void check_shapes(Shapes const& shapes) const;
  size_t workspace_bytes(Shapes const& largest) const;
  void enqueue_step(Step const& step) const;
};

}  // namespace m3
