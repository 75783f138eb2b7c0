#pragma once

#include <NvInferRuntime.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "common/error.h"

namespace m3 {

// One attribute of an op: its name, where it lives in the op's attribute struct, what it may be.
// The same table parses, advertises and serialises, so the three cannot drift.
template <class Attributes>
struct FieldSpec {
  char const* name;
  std::variant<int32_t Attributes::*, float Attributes::*, std::string Attributes::*> member;
  double low = std::numeric_limits<int32_t>::min();   // numbers: inclusive range
  double high = std::numeric_limits<int32_t>::max();  //
  char const* choices = "";                           // strings: "none|gelu_erf"

  nvinfer1::PluginFieldType type() const {
    switch (member.index()) {
      case 0:
        return nvinfer1::PluginFieldType::kINT32;
      case 1:
        return nvinfer1::PluginFieldType::kFLOAT32;
      default:
        return nvinfer1::PluginFieldType::kCHAR;
    }
  }
};

// A field's value out of a collection. `where` opens the message of the error that a wrong type,
// length or range throws.
double read_number(nvinfer1::PluginField const& field, bool integral, double low, double high,
                   std::string const& where);
std::string read_choice(nvinfer1::PluginField const& field, char const* choices,
                        std::string const& where);

// Strict: every field of the table exactly once, nothing else.
// Throws Error that names `op`, the field, what was found and what is allowed.
template <class Attributes, size_t N>
Attributes parse_fields(FieldSpec<Attributes> const (&table)[N],
                        nvinfer1::PluginFieldCollection const* collection, char const* op) {
  M3_CHECK(collection != nullptr, "%s: no field collection was given", op);
  Attributes attributes{};
  bool seen[N] = {};
  std::string known;
  for (auto const& spec : table) known += std::string(known.empty() ? "" : ", ") + spec.name;
  for (int32_t i = 0; i < collection->nbFields; ++i) {
    auto const& field = collection->fields[i];
    M3_CHECK(field.name != nullptr, "%s: field %d has no name", op, i);
    size_t k = 0;
    while (k < N && std::strcmp(table[k].name, field.name) != 0) ++k;
    M3_CHECK(k < N, "%s: unknown attribute '%s'; it takes %s", op, field.name, known.c_str());
    M3_CHECK(!seen[k], "%s: attribute '%s' is given twice", op, field.name);
    seen[k] = true;
    auto const& spec = table[k];
    std::string const where = format("%s: attribute '%s'", op, field.name);
    std::visit(
        [&](auto member) {
          using Value = std::remove_reference_t<decltype(attributes.*member)>;
          if constexpr (std::is_same_v<Value, std::string>) {
            // The size test spares attribute structs without a string gcc 12's array-bounds
            // warning.
            if constexpr (sizeof(Attributes) >= sizeof(std::string)) {
              attributes.*member = read_choice(field, spec.choices, where);
            }
          } else {
            attributes.*member = static_cast<Value>(
                read_number(field, std::is_integral_v<Value>, spec.low, spec.high, where));
          }
        },
        spec.member);
  }
  for (size_t k = 0; k < N; ++k) {
    M3_CHECK(seen[k], "%s: attribute '%s' is missing; it takes %s", op, table[k].name,
             known.c_str());
  }
  return attributes;
}

// Field list for getFieldsToSerialize: pointers into `attributes`, which must outlive it.
template <class Attributes, size_t N>
std::vector<nvinfer1::PluginField> serialise_fields(FieldSpec<Attributes> const (&table)[N],
                                                    Attributes const& attributes) {
  std::vector<nvinfer1::PluginField> fields;
  for (auto const& spec : table) {
    std::visit(
        [&](auto member) {
          auto const& value = attributes.*member;
          if constexpr (std::is_same_v<std::decay_t<decltype(value)>, std::string>) {
            fields.emplace_back(spec.name, value.data(), spec.type(),
                                static_cast<int32_t>(value.size()));
          } else {
            fields.emplace_back(spec.name, &value, spec.type(), 1);
          }
        },
        spec.member);
  }
  return fields;
}

// Field list for getFieldNames: names and types, no values.
template <class Attributes, size_t N>
std::vector<nvinfer1::PluginField> advertise_fields(FieldSpec<Attributes> const (&table)[N]) {
  std::vector<nvinfer1::PluginField> fields;
  for (auto const& spec : table) fields.emplace_back(spec.name, nullptr, spec.type(), 1);
  return fields;
}

}  // namespace m3
