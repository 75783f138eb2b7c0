#pragma once

#include <stdexcept>
#include <string>

namespace m3 {

// What M3_CHECK throws. Only the guards in plugin_base.h and creator.h catch it.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::string format(char const* fmt, ...) __attribute__((format(printf, 1, 2)));

}  // namespace m3

// Throws m3::Error with a sentence (printf style) when the condition does not hold. The sentence
// says what was found and what is needed; the condition's text and place are added to it.
#define M3_CHECK(condition, ...)                                                            \
  do {                                                                                      \
    if (!(condition)) {                                                                     \
      throw ::m3::Error(::m3::format(__VA_ARGS__) + ::m3::format(" [%s:%d: %s]",            \
                                                                 ::m3::base_name(__FILE__), \
                                                                 __LINE__, #condition));    \
    }                                                                                       \
  } while (false)

namespace m3 {

constexpr char const* base_name(char const* path) {
  char const* name = path;
  for (; *path != '\0'; ++path) {
    if (*path == '/') name = path + 1;
  }
  return name;
}

}  // namespace m3
