#pragma once

#include "common/plugin_base.h"

namespace m3 {

struct BlockSelectAttributes {
  int32_t block_size;
  int32_t top_k;
  int32_t init_blocks;
  int32_t local_blocks;
};

// Which blocks of its sequence a query attends to, for each index head on its own.
class BlockSelectPlugin final : public PluginBase<BlockSelectPlugin, BlockSelectAttributes> {
 public:
  using PluginBase::PluginBase;

  static constexpr char const* kName = "M3BlockSelect";
  static constexpr FieldSpec<BlockSelectAttributes> kFields[] = {
      {"block_size", &BlockSelectAttributes::block_size, 1},
      {"top_k", &BlockSelectAttributes::top_k, 1},
      {"init_blocks", &BlockSelectAttributes::init_blocks, 0},
      {"local_blocks", &BlockSelectAttributes::local_blocks, 1},
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
