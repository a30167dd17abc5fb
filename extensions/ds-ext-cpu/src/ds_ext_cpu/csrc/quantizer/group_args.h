// What the loops of the quantizer are given. Formulas and layout: deepspeed/ops/quantizer/groups.py.
#pragma once

#include <cstdint>

#include "common/check.h"

namespace ds_cpu {

// Groups longer than a piece are measured and converted in pieces, so that threads share them. Even: a byte of two
// 4-bit numbers lies in one piece.
constexpr int64_t kPiece = 65536;
// Within a piece, blocks pass through fp32 in the first cache: then one loop serves every dtype. Even, too.
constexpr int64_t kBlock = 1024;

// Smallest and largest element, as integers that order like the numbers; NaN lies beyond either infinity, so it stays.
struct Range {
    int32_t low;
    int32_t high;
};

// Where numbers go: level = round((x - shift) * inverse) clamped to [bottom, top]; q = level - back.
struct Grid {
    float shift;
    float inverse;
    float bottom;
    float top;
    float back;
    float scale;
    float offset;
};

struct GroupArgs {
    int64_t group_size;
    int64_t pieces;  // of each group
    int32_t num_bits;
    bool symmetric;
    Dtype dtype;  // of x and out
    const void* x;
    int8_t* q;      // int8, or packed int4; null: fake quantization
    void* out;      // numbers, where q is null
    float* params;  // per group: scale, and offset when asymmetric
    Range* ranges;  // per piece, where a group has several
};

struct NumberArgs {
    int64_t group_size;
    int64_t group_bytes;
    int64_t pieces;
    int64_t num_groups;
    int64_t num_copies;  // added up
    int32_t num_bits;
    int32_t num_params;  // of each group: 1 or 2
    float factor;        // of the sum
    const int8_t* q;
    const float* params;
    Dtype dtype;  // of out
    void* out;
};

}  // namespace ds_cpu
