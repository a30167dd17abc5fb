// What the kernels of the quantizer are given. Formulas and layout: deepspeed/ops/quantizer/groups.py.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace ds_xpu {

// Groups longer than a piece are measured and converted in pieces, so that a long one fills the device, too. Even: a
// byte of two 4-bit integers lies in one piece.
constexpr int64_t kPiece = 16384;

// Where numbers go: level = round((x - shift) / scale) clamped to [bottom, top]; q = level - back.
struct QuantizeArgs {
    int64_t group_size;
    int64_t group_bytes;
    int64_t num_pieces;  // of each group
    int32_t packed;      // two 4-bit integers in a byte
    int32_t symmetric;
    float bottom;
    float top;
    float back;
    float per_level;  // 1 / number of steps between the extremes
    FloatArray x;
    float* ranges;   // per piece: smallest and largest element; null where a group is one piece
    int8_t* q;       // int8 or packed int4; null: fake quantization
    float* params;   // per group: scale, and offset when asymmetric
    FloatArray out;  // numbers, where q is null
};

struct DequantizeArgs {
    int64_t numel;  // of out
    int64_t group_size;
    int64_t group_bytes;
    int64_t num_groups;
    int64_t num_copies;  // added up
    int32_t packed;
    int32_t num_params;  // of each group: 1 or 2
    float factor;        // of the sum
    const int8_t* q;
    const float* params;
    FloatArray out;
};

}  // namespace ds_xpu
