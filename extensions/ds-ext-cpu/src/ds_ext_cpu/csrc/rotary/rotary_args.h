// What the loop of the rotary embedding is given. Formulas: deepspeed/ops/transformer/rotary.py.
#pragma once

#include <cstdint>

namespace ds_cpu {

struct RotaryArgs {
    int64_t head_dim;
    int64_t half;               // pairs that turn
    int64_t length;             // positions
    int64_t rows_per_position;  // consecutive rows of one position
    int64_t rows_per_batch;
    bool table_per_batch;
    bool interleaved;
    const void* x;
    const float* cos;  // (length, half), or (batch, length, half)
    const float* sin;
    void* out;
};

}  // namespace ds_cpu
