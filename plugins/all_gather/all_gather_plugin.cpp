#include "all_gather/all_gather_plugin.h"

#include "common/communicator.h"
#include "common/creator.h"
#include "common/nccl.h"
#include "kernels/smxx_interleave_ranks.h"

namespace m3 {

using nvinfer1::DataType;

TypeTable AllGatherPlugin::types(int32_t num_inputs) const {
  M3_CHECK(num_inputs == 1, "%d inputs are connected; it takes one", num_inputs);
  return {{"x", "y"}, {{DataType::kBF16, DataType::kBF16}, {DataType::kFLOAT, DataType::kFLOAT}}};
}

void AllGatherPlugin::output_shapes(nvinfer1::DimsExprs const* in, nvinfer1::DimsExprs* out,
                                    nvinfer1::IExprBuilder& builder) const {
  M3_CHECK(in[0].nbDims == 2, "x has %d dimensions; it takes [rows, columns]", in[0].nbDims);
  out[0] = in[0];
  out[0].d[1] = builder.operation(nvinfer1::DimensionOperation::kPROD, *in[0].d[1],
                                  *builder.constant(attributes().group_size));
}

void AllGatherPlugin::check_shapes(Shapes const& shapes) const {
  dim(shapes.in[0], 2, 0, "x");
}

size_t AllGatherPlugin::workspace_bytes(Shapes const& largest) const {
  return volume(largest.in[0]) * attributes().group_size * type_bytes(largest.in_types[0]);
}

void AllGatherPlugin::enqueue_step(Step const& step) const {
  auto const& x = step.in[0].dims;
  int64_t const count = volume(x);
  if (count == 0) return;
  bool const one_row = x.d[0] == 1;  // then rank-major is already y's order
  void* gathered = one_row ? step.outputs[0] : step.workspace;
  nccl::all_gather(step.inputs[0], gathered, count, step.in[0].type,
                   communicator(attributes().group_size), step.stream);
  if (one_row) return;

  kernels::InterleaveRanksParams p{};
  p.in = gathered;
  p.out = step.outputs[0];
  p.ranks = attributes().group_size;
  p.rows = x.d[0];
  p.columns = x.d[1];
  p.type = kernel_type(step.in[0].type);
  check_launch(kernels::launch_interleave_ranks(p, step.stream), "interleave_ranks");
}

}  // namespace m3

M3_DEFINE_CREATOR(all_gather, m3::AllGatherPlugin)
