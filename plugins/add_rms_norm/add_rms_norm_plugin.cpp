#include "add_rms_norm/add_rms_norm_plugin.h"

#include "common/creator.h"
#include "kernels/smxx_add_rms_norm.h"

namespace m3 {

using nvinfer1::DataType;
using nvinfer1::Dims;

TypeTable AddRmsNormPlugin::types(int32_t num_inputs) const {
  int32_t const expected = 2 + attributes().has_residual + attributes().has_rows;
  M3_CHECK(num_inputs == expected, "%d inputs are connected; has_residual=%d, has_rows=%d take %d",
           num_inputs, attributes().has_residual, attributes().has_rows, expected);
  TypeTable table;
  table.ports = {"x"};
  if (has_residual()) table.ports.push_back("residual");
  table.ports.push_back("weight");
  if (has_rows()) table.ports.push_back("rows");
  table.ports.push_back("normed");
  if (writes_sum()) table.ports.push_back("sum");
  for (DataType type : {DataType::kBF16, DataType::kFLOAT}) {
    std::vector<DataType> row(table.ports.size(), type);
    row[weight_input()] = DataType::kFLOAT;
    if (has_rows()) row[weight_input() + 1] = DataType::kINT32;
    table.rows.push_back(row);
  }
  return table;
}

void AddRmsNormPlugin::output_shapes(nvinfer1::DimsExprs const* in, nvinfer1::DimsExprs* out,
                                     nvinfer1::IExprBuilder&) const {
  out[0] = in[0];
  if (has_rows()) out[0].d[0] = in[weight_input() + 1].d[0];
  if (writes_sum()) out[1] = in[0];
}

void AddRmsNormPlugin::check_shapes(Shapes const& shapes) const {
  Dims const& x = shapes.in[0];
  int64_t const rows = dim(x, 2, 0, "x");
  int64_t const most =
      kernels::kMaxNormBytes / static_cast<int64_t>(type_bytes(shapes.in_types[0]));
  M3_CHECK(x.d[1] > 0 && x.d[1] % 8 == 0 && x.d[1] <= most,
           "x has shape %s; rows take a multiple of 8 columns, up to %lld", to_string(x).c_str(),
           static_cast<long long>(most));
  if (has_residual()) {
    Dims const& residual = shapes.in[1];
    M3_CHECK(dim(residual, 2, 0, "residual") == rows && residual.d[1] == x.d[1],
             "residual has shape %s and x %s; both take the same", to_string(residual).c_str(),
             to_string(x).c_str());
  }
  Dims const& weight = shapes.in[weight_input()];
  M3_CHECK(dim(weight, 1, 0, "weight") == x.d[1], "weight has shape %s; x %s takes [%lld]",
           to_string(weight).c_str(), to_string(x).c_str(), static_cast<long long>(x.d[1]));
  if (has_rows()) dim(shapes.in[weight_input() + 1], 1, 0, "rows");
}

void AddRmsNormPlugin::enqueue_step(Step const& step) const {
  kernels::AddRmsNormParams p{};
  p.x = step.inputs[0];
  p.residual = has_residual() ? step.inputs[1] : nullptr;
  p.weight = step.input<float>(weight_input());
  p.rows = has_rows() ? step.input<int32_t>(weight_input() + 1) : nullptr;
  p.normed = step.outputs[0];
  p.sum = writes_sum() ? step.outputs[1] : nullptr;
  p.num_rows = step.out[0].dims.d[0];
  p.hidden = static_cast<int32_t>(step.in[0].dims.d[1]);
  p.epsilon = attributes().epsilon;
  p.type = kernel_type(step.in[0].type);
  check_launch(kernels::launch_add_rms_norm(p, step.stream), "add_rms_norm");
}

}  // namespace m3

M3_DEFINE_CREATOR(add_rms_norm, m3::AddRmsNormPlugin)
