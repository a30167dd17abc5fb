// What the loops of linear layers of few rows are given. Formulas: deepspeed/ops/transformer/linear.py, and
// deepspeed/ops/quantizer/packed.py for quantized weights.
#pragma once

#include <cstdint>

#include "common/check.h"

namespace ds_cpu {

// [Note: a linear layer of few rows]
// The weight is read from memory once, in the order in which it lies, and every number of it is used for all rows of x
// at once; so the time is that of the reading. Rows of x are first copied as fp32, in the order in which the loop reads
// them: block by block, all rows of a block side by side, and in a block in the order in which the numbers of a weight
// come out of their registers (for bf16 and int4: those at even places, then those at odd ones). The end of a group is
// padded with zeros to a whole block. So one loop serves every kind of weight, without moving lanes.
// Where the machine multiplies bf16, x in bf16 is copied as such; then products are exact and sums fp32 as well. Where
// it multiplies bytes, packed weights have a pass in integers: see [Note: x in 16 bits].
struct LinearArgs {
    int64_t rows;         // of x
    int64_t padded_rows;  // 1, 2, 4, 8 or 16
    int64_t outs;
    int64_t groups;          // of a row of the weight; 1 where it is not quantized
    int64_t group_size;      // elements
    int64_t group_stride;    // of the copy of x: numbers of a group with its padding
    int64_t group_bytes;     // of the weight
    int64_t input_bits;      // to which x may be rounded, 8; else 16
    int64_t prefetch_bytes;  // how far ahead the loop asks for the weight; its own
    Dtype dtype;             // of x and y
    const void* x;           // (rows, groups * group_size)
    float* copy;             // padded_rows * groups * group_stride numbers
    float* sums;             // (padded_rows, groups): of x in each group; null without zeros
    const uint8_t* weight;   // (outs, groups, group_bytes)
    const float* scales;     // (outs, groups); null where the weight is not quantized
    const float* zeros;      // as scales; null: symmetric
    const float* bias;       // (outs); null: none
    void* y;                 // (rows, outs)
};

constexpr int64_t kMostRows = 16;

}  // namespace ds_cpu
