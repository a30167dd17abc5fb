// What the kernel of gelu is given. Formulas: deepspeed/ops/transformer/gelu.py.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace ds_xpu {

struct GeluArgs {
    int64_t numel;
    int64_t cols;
    int32_t tanh;
    FloatArray bias;  // per column; no data: none
    FloatArray x;
    FloatArray out;
};

}  // namespace ds_xpu
