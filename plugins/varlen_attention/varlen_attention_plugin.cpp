#include "varlen_attention/varlen_attention_plugin.h"

#include "common/creator.h"
#include "kernels/smxx_varlen_attention.h"

namespace m3 {

using nvinfer1::DataType;

TypeTable VarlenAttentionPlugin::types(int32_t num_inputs) const {
  M3_CHECK(num_inputs == 4, "%d inputs are connected; it takes q, k, v, cu_seqlens", num_inputs);
  TypeTable table;
  table.ports = {"q", "k", "v", "cu_seqlens", "y"};
  for (DataType type : {DataType::kBF16, DataType::kFLOAT}) {
    table.rows.push_back({type, type, type, DataType::kINT32, type});
  }
  return table;
}

void VarlenAttentionPlugin::output_shapes(nvinfer1::DimsExprs const* in, nvinfer1::DimsExprs* out,
                                          nvinfer1::IExprBuilder& builder) const {
  M3_CHECK(in[0].nbDims == 3, "q has %d dimensions; it takes [rows, heads, head_size]",
           in[0].nbDims);
  out[0].nbDims = 2;
  out[0].d[0] = in[0].d[0];
  out[0].d[1] = builder.operation(nvinfer1::DimensionOperation::kPROD, *in[0].d[1], *in[0].d[2]);
}

void VarlenAttentionPlugin::check_shapes(Shapes const& shapes) const {
  int64_t const head_size = dim(shapes.in[0], 3, 2, "q");
  M3_CHECK(head_size >= 1 && head_size <= kernels::kMaxVarlenHeadSize,
           "q has shape %s; head sizes 1 to %d are supported", to_string(shapes.in[0]).c_str(),
           kernels::kMaxVarlenHeadSize);
  for (int32_t i : {1, 2}) {
    M3_CHECK(to_string(shapes.in[i]) == to_string(shapes.in[0]),
             "q has shape %s and %s %s; they must be equal", to_string(shapes.in[0]).c_str(),
             i == 1 ? "k" : "v", to_string(shapes.in[i]).c_str());
  }
  M3_CHECK(dim(shapes.in[3], 1, 0, "cu_seqlens") >= 1,
           "cu_seqlens is empty; it takes segments + 1 entries");
}

void VarlenAttentionPlugin::enqueue_step(Step const& step) const {
  auto const& q = step.in[0].dims;
  kernels::VarlenAttentionParams p{};
  p.q = step.inputs[0];
  p.k = step.inputs[1];
  p.v = step.inputs[2];
  p.cu_seqlens = step.input<int32_t>(3);
  p.out = step.outputs[0];
  p.rows = q.d[0];
  p.heads = static_cast<int32_t>(q.d[1]);
  p.head_size = static_cast<int32_t>(q.d[2]);
  p.segments = static_cast<int32_t>(step.in[3].dims.d[0] - 1);
  p.softmax_scale = attributes().softmax_scale;
  p.type = kernel_type(step.in[0].type);
  check_launch(kernels::launch_varlen_attention(p, step.stream), "varlen_attention");
}

}  // namespace m3

M3_DEFINE_CREATOR(varlen_attention, m3::VarlenAttentionPlugin)
