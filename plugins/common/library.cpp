#include <NvInferRuntime.h>

#include "common/communicator.h"
#include "common/log.h"

#define M3_EXPORT extern "C" __attribute__((visibility("default")))

namespace m3 {

#define M3_PLUGIN(op) nvinfer1::IPluginCreatorInterface* op##_creator();
#include "plugin_list.inc"
#undef M3_PLUGIN

}  // namespace m3

// The two names that the plugin registry's load_library looks for.
M3_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
#define M3_PLUGIN(op) m3::op##_creator(),
  static nvinfer1::IPluginCreatorInterface* const creators[] = {
#include "plugin_list.inc"
  };
#undef M3_PLUGIN
  count = sizeof(creators) / sizeof(creators[0]);
  return creators;
}

M3_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
  m3::set_logger_finder(finder);
}

// Before the first execution of an engine with tensor-parallel ops: `comm` is the ncclComm_t of
// this process for groups of `group` ranks; nullptr forgets it. Never serialised.
M3_EXPORT void m3_set_communicator(int group, void* comm) {
  m3::set_communicator(group, comm);
}

// Version of the library, "major.minor.patch"; engines record it.
M3_EXPORT char const* m3_plugins_version() {
  return M3_PLUGINS_VERSION;
}
