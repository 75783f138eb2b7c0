#include "common/dynamic_library.h"

#include <dlfcn.h>

#include <string>

#include "common/error.h"

namespace m3 {

void* open_library(char const* purpose, std::initializer_list<char const*> names) {
  std::string tried;
  std::string reason;
  for (char const* name : names) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
    char const* message = dlerror();
    tried += (tried.empty() ? "" : ", ") + std::string(name);
    reason = message == nullptr ? "" : message;
  }
  M3_CHECK(false,
           "%s needs one of %s, and the loader found none (%s): put its folder on "
           "LD_LIBRARY_PATH or load it into the process first",
           purpose, tried.c_str(), reason.c_str());
  return nullptr;
}

void* find_symbol(void* library, char const* symbol) {
  void* address = dlsym(library, symbol);
  M3_CHECK(address != nullptr, "the library that was opened has no %s", symbol);
  return address;
}

}  // namespace m3
