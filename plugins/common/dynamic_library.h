#pragma once

#include <initializer_list>

namespace m3 {

// Opens the first of `names` that the loader finds; they stay open for the process. Throws Error
// that lists the names tried and the loader's last words.
void* open_library(char const* purpose, std::initializer_list<char const*> names);

// Throws Error when the library lacks the symbol.
void* find_symbol(void* library, char const* symbol);

template <class Function>
void load_symbol(void* library, char const* symbol, Function*& function) {
  function = reinterpret_cast<Function*>(find_symbol(library, symbol));
}

}  // namespace m3
