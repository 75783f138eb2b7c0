// Creates one plugin from fields, asks for the fields that it would write into an engine, creates a
// second plugin from those as a runtime does, and prints what the second one would write.
//
//   m3_field_round_trip LIBRARY OP NAME=TYPE:VALUE...      TYPE: i (int32), f (float32), s (string)
//   m3_field_round_trip LIBRARY OP NAME=TYPE:VALUE... --inputs TYPE:DIMxDIM... ...
//                                                          TYPE: bf16, f32, e4m3, i32
//
// One line "NAME=TYPE:VALUE" per field on stdout; with inputs of a profile's largest shapes instead
// the bytes of workspace that the plugin asks for. Exit code 1 when a step fails.
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

using namespace nvinfer1;

namespace {

struct Value {
  std::string name, text;
  int32_t integer;
  float real;
};

[[noreturn]] void fail(char const* what) {
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

std::vector<PluginField> parse(int count, char** arguments, std::deque<Value>& values) {
  std::vector<PluginField> fields;
  for (int i = 0; i < count; ++i) {
    std::string const argument = arguments[i];
    size_t const equals = argument.find('=');
    std::string const text = argument.substr(equals + 3);
    values.push_back({argument.substr(0, equals), text, std::atoi(text.c_str()),
                      std::strtof(text.c_str(), nullptr)});
    Value const& value = values.back();
    switch (argument[equals + 1]) {
      case 'i':
        fields.emplace_back(value.name.c_str(), &value.integer, PluginFieldType::kINT32, 1);
        break;
      case 'f':
        fields.emplace_back(value.name.c_str(), &value.real, PluginFieldType::kFLOAT32, 1);
        break;
      default:
        fields.emplace_back(value.name.c_str(), value.text.data(), PluginFieldType::kCHAR,
                            static_cast<int32_t>(value.text.size()));
    }
  }
  return fields;
}

PluginFieldCollection const* serialised(IPluginV3* plugin) {
  auto* runtime = static_cast<IPluginV3OneRuntime*>(
      plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
  return runtime->getFieldsToSerialize();
}

void print(PluginField const& field) {
  if (field.type == PluginFieldType::kINT32) {
    std::printf("%s=i:%d\n", field.name, *static_cast<int32_t const*>(field.data));
  } else if (field.type == PluginFieldType::kFLOAT32) {
    std::printf("%s=f:%.9g\n", field.name, *static_cast<float const*>(field.data));
  } else {
    std::printf("%s=s:%.*s\n", field.name, field.length, static_cast<char const*>(field.data));
  }
}

DynamicPluginTensorDesc input(std::string const& argument) {
  size_t const colon = argument.find(':');
  std::string const type = argument.substr(0, colon);
  DynamicPluginTensorDesc tensor{};
  tensor.desc.type = type == "bf16"   ? DataType::kBF16
                     : type == "f32"  ? DataType::kFLOAT
                     : type == "e4m3" ? DataType::kFP8
                                      : DataType::kINT32;
  for (size_t at = colon; at != std::string::npos; at = argument.find('x', at + 1)) {
    tensor.max.d[tensor.max.nbDims++] = std::atoll(argument.c_str() + at + 1);
  }
  tensor.desc.dims = tensor.min = tensor.opt = tensor.max;
  return tensor;
}

size_t workspace_bytes(IPluginV3* plugin, int count, char** arguments) {
  std::vector<DynamicPluginTensorDesc> inputs;
  for (int i = 0; i < count; ++i) inputs.push_back(input(arguments[i]));
  auto* build = static_cast<IPluginV3OneBuildV2*>(
      plugin->getCapabilityInterface(PluginCapabilityType::kBUILD));
  DynamicPluginTensorDesc const output{};
  if (build->configurePlugin(inputs.data(), count, &output, 1) != 0) fail("shapes are refused");
  return build->getWorkspaceSize(inputs.data(), count, &output, 1);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) fail("usage: m3_field_round_trip LIBRARY OP NAME=TYPE:VALUE...");
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) fail(dlerror());
  using GetCreators = IPluginCreatorInterface* const*(int32_t&);
  auto* get_creators = reinterpret_cast<GetCreators*>(dlsym(library, "getCreators"));
  if (get_creators == nullptr) fail("the library exports no getCreators");
  int32_t count = 0;
  auto* const* creators = get_creators(count);
  IPluginCreatorV3One* creator = nullptr;
  for (int32_t i = 0; i < count; ++i) {
    auto* candidate = static_cast<IPluginCreatorV3One*>(creators[i]);
    if (std::strcmp(candidate->getPluginName(), argv[2]) == 0) creator = candidate;
  }
  if (creator == nullptr) fail("the library has no such op");

  int end = 3;  // of the fields
  while (end < argc && std::strcmp(argv[end], "--inputs") != 0) ++end;
  std::deque<Value> values;
  auto const fields = parse(end - 3, argv + 3, values);
  PluginFieldCollection const given{static_cast<int32_t>(fields.size()), fields.data()};
  IPluginV3* first = creator->createPlugin("layer", &given, TensorRTPhase::kBUILD);
  if (first == nullptr) fail("the plugin was not created from its attributes");
  // The clone's fields must not point into the original.
  IPluginV3* clone = first->clone();
  delete first;
  IPluginV3* second = creator->createPlugin("layer", serialised(clone), TensorRTPhase::kRUNTIME);
  delete clone;
  if (second == nullptr) fail("the plugin was not created from its serialised fields");
  if (end < argc) {
    std::printf("%zu\n", workspace_bytes(second, argc - end - 1, argv + end + 1));
    delete second;
    return 0;
  }
  PluginFieldCollection const* written = serialised(second);
  for (int32_t i = 0; i < written->nbFields; ++i) print(written->fields[i]);
  delete second;
  return 0;
}
