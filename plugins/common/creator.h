#pragma once

#include <NvInferRuntime.h>

#include <memory>
#include <vector>

#include "common/fields.h"
#include "common/log.h"

namespace m3 {

// Makes `Plugin` from a field collection, in the build phase (attributes of the ONNX node) and in
// the runtime phase (what getFieldsToSerialize wrote): both are parsed by the same table.
template <class Plugin>
class Creator final : public nvinfer1::IPluginCreatorV3One {
 public:
  Creator() : fields_(advertise_fields(Plugin::kFields)) {
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  }

  nvinfer1::AsciiChar const* getPluginName() const noexcept override { return Plugin::kName; }
  nvinfer1::AsciiChar const* getPluginVersion() const noexcept override { return "1"; }
  nvinfer1::AsciiChar const* getPluginNamespace() const noexcept override { return ""; }
  nvinfer1::PluginFieldCollection const* getFieldNames() noexcept override { return &collection_; }

  nvinfer1::IPluginV3* createPlugin(nvinfer1::AsciiChar const* layer,
                                    nvinfer1::PluginFieldCollection const* fields,
                                    nvinfer1::TensorRTPhase) noexcept override {
    try {
      auto plugin = std::make_unique<Plugin>(parse_fields(Plugin::kFields, fields, Plugin::kName),
                                             layer == nullptr ? "" : layer);
      plugin->check_attributes();
      return plugin.release();
    } catch (std::exception const& error) {
      log(nvinfer1::ILogger::Severity::kERROR,
          std::string("layer '") + (layer == nullptr ? "" : layer) + "': " + error.what());
    } catch (...) {
      log(nvinfer1::ILogger::Severity::kERROR, Plugin::kName);
    }
    return nullptr;
  }

 private:
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_{};
};

}  // namespace m3

// At the end of <op>_plugin.cpp: what the line M3_PLUGIN(op) of plugin_list.inc refers to.
#define M3_DEFINE_CREATOR(op, Plugin)                 \
  namespace m3 {                                      \
  nvinfer1::IPluginCreatorInterface* op##_creator() { \
    static Creator<Plugin> creator;                   \
    return &creator;                                  \
  }                                                   \
  }
