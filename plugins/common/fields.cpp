#include "common/fields.h"

#include <cmath>

namespace m3 {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

double read_number(PluginField const& field, bool integral, double low, double high,
                   std::string const& where) {
  M3_CHECK(field.data != nullptr && field.length == 1, "%s has length %d; it takes one number",
           where.c_str(), field.length);
  double value = 0;
  switch (field.type) {
    case PluginFieldType::kINT32:
      value = *static_cast<int32_t const*>(field.data);
      break;
    case PluginFieldType::kINT64:
      value = static_cast<double>(*static_cast<int64_t const*>(field.data));
      break;
    case PluginFieldType::kFLOAT32:
      M3_CHECK(!integral, "%s is a float; it takes an integer", where.c_str());
      value = *static_cast<float const*>(field.data);
      break;
    case PluginFieldType::kFLOAT64:
      M3_CHECK(!integral, "%s is a float; it takes an integer", where.c_str());
      value = *static_cast<double const*>(field.data);
      break;
    default:
      M3_CHECK(false, "%s has field type %d; it takes %s", where.c_str(),
               static_cast<int>(field.type), integral ? "an integer" : "a number");
  }
  M3_CHECK(std::isfinite(value) && value >= low && value <= high,
           "%s is %.9g; allowed are %.9g to %.9g", where.c_str(), value, low, high);
  return value;
}

std::string read_choice(PluginField const& field, char const* choices, std::string const& where) {
  M3_CHECK(field.type == PluginFieldType::kCHAR && field.data != nullptr && field.length >= 0,
           "%s has field type %d; it takes a string, one of %s", where.c_str(),
           static_cast<int>(field.type), choices);
  std::string value(static_cast<char const*>(field.data), field.length);
  while (!value.empty() && value.back() == '\0') value.pop_back();  // some callers count it
  std::string const list = std::string("|") + choices + "|";
  M3_CHECK(
      value.find('|') == std::string::npos && list.find("|" + value + "|") != std::string::npos,
      "%s is '%s'; allowed are %s", where.c_str(), value.c_str(), choices);
  return value;
}

}  // namespace m3
