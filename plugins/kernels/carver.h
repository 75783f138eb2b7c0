#pragma once

#include <cstddef>
#include <cstdint>

namespace m3::kernels {

// Lays the arrays of a workspace out one after another, 256-byte aligned; with a null base it only
// counts.
class Carver {
 public:
  explicit Carver(void* base) : base_(static_cast<char*>(base)) {}
  void take_bytes(void*& pointer, int64_t bytes) {
    pointer = base_ + used_;
    used_ += (static_cast<size_t>(bytes) + 255) / 256 * 256;
  }
  template <class T>
  void take(T*& pointer, int64_t count) {
    void* at = nullptr;
    take_bytes(at, count * int64_t{sizeof(T)});
    pointer = static_cast<T*>(at);
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

}  // namespace m3::kernels
