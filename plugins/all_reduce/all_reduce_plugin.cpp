#include "all_reduce/all_reduce_plugin.h"

#include "common/communicator.h"
#include "common/creator.h"
#include "common/nccl.h"

namespace m3 {

using nvinfer1::DataType;

TypeTable AllReducePlugin::types(int32_t num_inputs) const {
  M3_CHECK(num_inputs == 1, "%d inputs are connected; it takes one", num_inputs);
  return {{"x", "y"}, {{DataType::kBF16, DataType::kBF16}, {DataType::kFLOAT, DataType::kFLOAT}}};
}

void AllReducePlugin::output_shapes(nvinfer1::DimsExprs const* in, nvinfer1::DimsExprs* out,
                                    nvinfer1::IExprBuilder&) const {
  out[0] = in[0];
}

void AllReducePlugin::enqueue_step(Step const& step) const {
  int64_t const count = volume(step.in[0].dims);
  if (count == 0) return;
  nccl::all_reduce(step.inputs[0], step.outputs[0], count, step.in[0].type,
                   communicator(attributes().group_size), step.stream);
}

}  // namespace m3

M3_DEFINE_CREATOR(all_reduce, m3::AllReducePlugin)
