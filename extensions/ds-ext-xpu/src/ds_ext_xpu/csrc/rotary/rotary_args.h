// What the kernel of the rotary embedding is given. Formulas: deepspeed/ops/transformer/rotary.py.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace ds_xpu {

struct RotaryArgs {
    int64_t num_items;  // rows * (half pairs + elements that pass)
    int64_t row_items;  // half + head_dim - 2 * half
    int64_t head_dim;
    int64_t half;               // pairs that turn
    int64_t length;             // positions
    int64_t rows_per_position;  // consecutive rows of one position
    int64_t rows_per_batch;
    int32_t table_per_batch;
    int32_t interleaved;
    const float* cos;  // (length, half), or (batch, length, half)
    const float* sin;
    FloatArray x;
    FloatArray out;
};

}  // namespace ds_xpu
