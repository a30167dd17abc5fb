// What the kernel of the norms is given. Formulas: deepspeed/ops/transformer/norm.py.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace ds_xpu {

struct NormArgs {
    int64_t cols;
    int32_t centered;  // layer norm: the mean is subtracted
    float eps;
    FloatArray x;
    FloatArray residual;  // no data: none
    FloatArray sum;       // x + residual, where there is one
    FloatArray weight;    // no data: 1
    FloatArray bias;      // no data: 0
    FloatArray out;
};

}  // namespace ds_xpu
