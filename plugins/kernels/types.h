#pragma once

namespace m3::kernels {

// Element types that kernels compute on.
enum class Type { kFloat32, kBfloat16, kFloat8E4m3 };

}  // namespace m3::kernels
