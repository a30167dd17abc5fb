// The floating dtypes that kernels read and write; arithmetic is always fp32.
#pragma once

#include <cstdint>

namespace ds {

enum class Dtype : int32_t { kFp32, kBf16, kFp16 };

}  // namespace ds
