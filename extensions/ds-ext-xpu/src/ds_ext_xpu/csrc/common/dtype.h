// The floating dtypes that kernels read and write; arithmetic is always fp32. For the host and for kernels.
#pragma once

#include <cstdint>

namespace ds_xpu {

enum class Dtype : int32_t { kFp32, kBf16, kFp16 };

// The elements of a tensor; `data` is null where there is no tensor.
struct FloatArray {
    void* data = nullptr;
    Dtype dtype = Dtype::kFp32;
};

}  // namespace ds_xpu
