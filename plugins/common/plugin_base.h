#pragma once

#include <NvInferRuntime.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "common/fields.h"
#include "common/log.h"
#include "common/tensors.h"

namespace m3 {

// TensorRT promises no alignment of workspaces (128 bytes were seen); cuBLASLt refuses less than
// this.
constexpr size_t kWorkspaceAlignment = 256;

inline void* align_workspace(void* workspace) {
  auto const address = reinterpret_cast<uintptr_t>(workspace) + kWorkspaceAlignment - 1;
  return reinterpret_cast<void*>(address / kWorkspaceAlignment * kWorkspaceAlignment);
}

// What enqueue gets. `workspace` is at least what workspace_bytes asked for the profile's maximum,
// aligned.
struct Step {
  nvinfer1::PluginTensorDesc const* in;
  nvinfer1::PluginTensorDesc const* out;
  void const* const* inputs;
  void* const* outputs;
  void* workspace;
  cudaStream_t stream;

  template <class T>
  T const* input(int32_t i) const {
    return static_cast<T const*>(inputs[i]);
  }
  template <class T>
  T* output(int32_t i) const {
    return static_cast<T*>(outputs[i]);
  }
  char* scratch(size_t offset) const { return static_cast<char*>(workspace) + offset; }
};

// Shapes and types of a call's tensors, without their data.
struct Shapes {
  std::vector<nvinfer1::Dims> in;
  std::vector<nvinfer1::DataType> in_types;
};

// The TensorRT side of every op. A plugin derives as
//     class GemmPlugin final : public PluginBase<GemmPlugin, GemmAttributes>
// and supplies, public, each free to throw through M3_CHECK:
//     static constexpr char const* kName;                        "M3Gemm"
//     static constexpr FieldSpec<Attributes> kFields[];          attributes
//     TypeTable types(int32_t num_inputs) const;                 throws on a wrong input count
//     void output_shapes(DimsExprs const* in, DimsExprs* out, IExprBuilder&) const;
//     void check_shapes(Shapes const&) const;    runs for the profile's extremes and for each new
//                                                shape, so only what holds for all of them
//     void enqueue_step(Step const&);
// and, where the defaults do not fit:
//     void check_attributes() const;             rules between attributes, at creation
//     int32_t num_outputs() const;               1
//     int32_t aliased_input(int32_t output);     -1
//     size_t workspace_bytes(Shapes const& largest) const;       0
template <class Derived, class Attributes_>
class PluginBase : public nvinfer1::IPluginV3,
                   public nvinfer1::IPluginV3OneCore,
                   public nvinfer1::IPluginV3OneBuildV2,
                   public nvinfer1::IPluginV3OneRuntime {
 public:
  using Attributes = Attributes_;

  PluginBase(Attributes attributes, std::string layer)
      : attributes_(std::move(attributes)), layer_(std::move(layer)) {}

  void check_attributes() const {}
  int32_t num_outputs() const { return 1; }
  int32_t aliased_input(int32_t) const { return -1; }
  size_t workspace_bytes(Shapes const&) const { return 0; }

  // IPluginV3
  nvinfer1::IPluginCapability* getCapabilityInterface(
      nvinfer1::PluginCapabilityType type) noexcept final {
    switch (type) {
      case nvinfer1::PluginCapabilityType::kBUILD:
        return static_cast<nvinfer1::IPluginV3OneBuildV2*>(this);
      case nvinfer1::PluginCapabilityType::kRUNTIME:
        return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
      case nvinfer1::PluginCapabilityType::kCORE:
        return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    }
    return nullptr;
  }
  nvinfer1::IPluginV3* clone() noexcept final {
    nvinfer1::IPluginV3* copy = nullptr;
    guard("clone", [&] { copy = new Derived(derived()); });
    return copy;
  }

  // IPluginV3OneCore
  nvinfer1::AsciiChar const* getPluginName() const noexcept final { return Derived::kName; }
  nvinfer1::AsciiChar const* getPluginVersion() const noexcept final { return "1"; }
  nvinfer1::AsciiChar const* getPluginNamespace() const noexcept final { return ""; }

  // IPluginV3OneBuildV2
  int32_t getNbOutputs() const noexcept final { return derived().num_outputs(); }

  int32_t getAliasedInput(int32_t output) noexcept final { return derived().aliased_input(output); }

  int32_t getOutputDataTypes(nvinfer1::DataType* out, int32_t num_out, nvinfer1::DataType const* in,
                             int32_t num_in) const noexcept final {
    return guard("getOutputDataTypes", [&] {
      auto const table = derived().types(num_in);
      for (auto const& row : table.rows) {
        if (!std::equal(in, in + num_in, row.begin())) continue;
        std::copy_n(row.begin() + num_in, num_out, out);
        return;
      }
      std::string found;
      for (int32_t i = 0; i < num_in; ++i) {
        found += (i > 0 ? " " : "") + table.ports[i] + "=" + type_name(in[i]);
      }
      M3_CHECK(false, "input types are %s; allowed are: %s", found.c_str(),
               table.describe().c_str());
    });
  }

  int32_t getOutputShapes(nvinfer1::DimsExprs const* in, int32_t num_in, nvinfer1::DimsExprs const*,
                          int32_t, nvinfer1::DimsExprs* out, int32_t,
                          nvinfer1::IExprBuilder& builder) noexcept final {
    return guard("getOutputShapes", [&] {
      derived().types(num_in);  // the input count
      derived().output_shapes(in, out, builder);
    });
  }

  bool supportsFormatCombination(int32_t pos, nvinfer1::DynamicPluginTensorDesc const* io,
                                 int32_t num_in, int32_t) noexcept final {
    bool supported = false;
    guard("supportsFormatCombination", [&] {
      auto const table = derived().types(num_in);
      std::vector<nvinfer1::DataType> types;
      for (int32_t i = 0; i <= pos; ++i) types.push_back(io[i].desc.type);
      supported = io[pos].desc.format == nvinfer1::TensorFormat::kLINEAR &&
                  table.matches(types.data(), pos + 1);
      if (!supported) {
        log(nvinfer1::ILogger::Severity::kVERBOSE,
            format("%s '%s': %s as %s, format %d, is not among: %s", Derived::kName, layer_.c_str(),
                   table.ports[pos].c_str(), type_name(io[pos].desc.type),
                   static_cast<int>(io[pos].desc.format), table.describe().c_str()));
      }
    });
    return supported;
  }

  int32_t configurePlugin(nvinfer1::DynamicPluginTensorDesc const* in, int32_t num_in,
                          nvinfer1::DynamicPluginTensorDesc const*, int32_t) noexcept final {
    return guard("configurePlugin", [&] {
      derived().check_shapes(
          shapes(in, num_in, [](auto const& tensor) { return tensor.min; }, descriptor));
      derived().check_shapes(
          shapes(in, num_in, [](auto const& tensor) { return tensor.max; }, descriptor));
    });
  }

  size_t getWorkspaceSize(nvinfer1::DynamicPluginTensorDesc const* in, int32_t num_in,
                          nvinfer1::DynamicPluginTensorDesc const*, int32_t) const noexcept final {
    size_t bytes = 0;
    guard("getWorkspaceSize", [&] {
      bytes = derived().workspace_bytes(
          shapes(in, num_in, [](auto const& tensor) { return tensor.max; }, descriptor));
    });
    return bytes == 0 ? 0 : bytes + kWorkspaceAlignment - 1;
  }

  // IPluginV3OneRuntime
  int32_t onShapeChange(nvinfer1::PluginTensorDesc const* in, int32_t num_in,
                        nvinfer1::PluginTensorDesc const*, int32_t) noexcept final {
    return guard("onShapeChange", [&] {
      derived().check_shapes(shapes(
          in, num_in, [](auto const& tensor) { return tensor.dims; },
          [](auto const& tensor) { return tensor; }));
    });
  }

  int32_t enqueue(nvinfer1::PluginTensorDesc const* in, nvinfer1::PluginTensorDesc const* out,
                  void const* const* inputs, void* const* outputs, void* workspace,
                  cudaStream_t stream) noexcept final {
    return guard("enqueue", [&] {
      derived().enqueue_step({in, out, inputs, outputs, align_workspace(workspace), stream});
    });
  }

  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept final {
    return clone();
  }

  nvinfer1::PluginFieldCollection const* getFieldsToSerialize() noexcept final {
    if (guard("getFieldsToSerialize",
              [&] { serialised_ = serialise_fields(Derived::kFields, attributes_); }) != 0) {
      return nullptr;
    }
    collection_ = {static_cast<int32_t>(serialised_.size()), serialised_.data()};
    return &collection_;
  }

 protected:
  PluginBase(PluginBase const& other)
      : nvinfer1::IPluginV3(other),
        nvinfer1::IPluginV3OneCore(other),
        nvinfer1::IPluginV3OneBuildV2(other),
        nvinfer1::IPluginV3OneRuntime(other),
        attributes_(other.attributes_),
        layer_(other.layer_) {}

  Attributes const& attributes() const { return attributes_; }

 private:
  static nvinfer1::PluginTensorDesc const& descriptor(
      nvinfer1::DynamicPluginTensorDesc const& tensor) {
    return tensor.desc;
  }

  template <class Tensor, class GetDims, class GetDesc>
  static Shapes shapes(Tensor const* tensors, int32_t count, GetDims dims, GetDesc desc) {
    Shapes result;
    for (int32_t i = 0; i < count; ++i) {
      result.in.push_back(dims(tensors[i]));
      result.in_types.push_back(desc(tensors[i]).type);
    }
    return result;
  }

  // Runs an override's body: 0, or 1 after logging what was thrown, with op and layer.
  template <class Body>
  int32_t guard(char const* method, Body&& body) const noexcept {
    try {
      body();
      return 0;
    } catch (std::exception const& error) {
      log_error(method, error.what());
    } catch (...) {
      log_error(method, "an exception that is not a std::exception");
    }
    return 1;
  }

  void log_error(char const* method, char const* what) const noexcept {
    try {
      log(nvinfer1::ILogger::Severity::kERROR,
          format("%s '%s', %s: %s", Derived::kName, layer_.c_str(), method, what));
    } catch (...) {
      log(nvinfer1::ILogger::Severity::kERROR, what);
    }
  }

  Derived& derived() { return static_cast<Derived&>(*this); }
  Derived const& derived() const { return static_cast<Derived const&>(*this); }

  Attributes attributes_;
  std::string layer_;
  std::vector<nvinfer1::PluginField> serialised_;
  nvinfer1::PluginFieldCollection collection_{};
};

// Launchers return a cudaError_t: turn it into an error that names it.
inline void check_launch(cudaError_t status, char const* kernel) {
  M3_CHECK(status == cudaSuccess, "%s could not be launched: %s (%s)", kernel,
           cudaGetErrorName(status), cudaGetErrorString(status));
}

}  // namespace m3
