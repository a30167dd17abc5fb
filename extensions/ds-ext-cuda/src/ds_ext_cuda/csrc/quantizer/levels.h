// From numbers to integers of few bits, for one group; the same bits as the torch reference: additions and
// multiplications are each rounded, never fused. Formulas and layout: deepspeed/ops/quantizer/groups.py.
#pragma once

#include <cfloat>
#include <climits>
#include <cmath>

#include "common/numbers.h"
#include "common/reduce.h"

namespace ds {

// Smallest and largest element, as integers that order like the numbers; NaN lies beyond either infinity, so it stays.
struct Range {
    int32_t low = INT_MAX;
    int32_t high = INT_MIN;
};

// Negative numbers have their magnitude bits turned over. Its own inverse.
__device__ __forceinline__ int32_t order_key(int32_t bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); }

__device__ __forceinline__ void include(Range& range, float number) {
    const int32_t key = order_key(__float_as_int(number));
    range.low = min(range.low, key);
    range.high = max(range.high, key);
}

__device__ __forceinline__ Range joined(Range a, Range b) { return {min(a.low, b.low), max(a.high, b.high)}; }

// Over `lanes` neighbours, a power of two up to a warp's size. Every lane of the warp calls.
__device__ __forceinline__ Range joined_by_lanes(Range range, int lanes) {
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
        const Range other = {__shfl_xor_sync(kAllLanes, range.low, distance),
                             __shfl_xor_sync(kAllLanes, range.high, distance)};
        range = joined(range, other);
    }
    return range;
}

__device__ __forceinline__ Range joined_by_block(Range range) {
    return {block_reduce(range.low, Min{}, INT_MAX), block_reduce(range.high, Max{}, INT_MIN)};
}

// Where numbers go: level = round((x - shift) * inverse) clamped to [bottom, top]; q = level - back. Of a group whose
// range and scale are finite no product is NaN, nor rounds to beyond the ends.
struct Scheme {
    float shift;
    float inverse;
    float bottom;
    float top;
    float back;
    float scale;
    float offset;

    __device__ __forceinline__ bool is_finite() const { return fabsf(scale) <= FLT_MAX && fabsf(shift) <= FLT_MAX; }
};

__device__ __forceinline__ Scheme scheme_of(Range range, int num_bits, bool symmetric) {
    const float tiny = 0x1p-126f;  // the smallest normal number: the scale of a group of zeros
    const float half = static_cast<float>(1 << (num_bits - 1));
    const bool empty = range.low > range.high;
    const float low = empty ? 0.0f : __int_as_float(order_key(range.low));
    const float high = empty ? 0.0f : __int_as_float(order_key(range.high));
    if (symmetric) {
        const float most = low != low ? low : (-low > high ? -low : high);
        float scale = __fmul_rn(most, static_cast<float>(1.0 / (half - 1)));
        scale = scale < tiny ? tiny : scale;
        return {0.0f, __frcp_rn(scale), 1 - half, half - 1, 0.0f, scale, 0.0f};
    }
    float scale = __fmul_rn(__fsub_rn(high, low), static_cast<float>(1.0 / (2 * half - 1)));
    scale = scale < tiny ? tiny : scale;
    return {low, __frcp_rn(scale), 0.0f, 2 * half - 1, half, scale, __fadd_rn(low, __fmul_rn(half, scale))};
}

// q as fp32; NaN stays NaN.
__device__ __forceinline__ float level_of(float x, const Scheme& scheme) {
    float level = __fmul_rn(__fsub_rn(x, scheme.shift), scheme.inverse);
    level = level < scheme.bottom ? scheme.bottom : level;
    level = level > scheme.top ? scheme.top : level;
    return rintf(level) - scheme.back;
}

// NaN gives 0, as the conversion has it.
__device__ __forceinline__ int8_t integer_of(float x, const Scheme& scheme) {
    return static_cast<int8_t>(__float2int_rn(level_of(x, scheme)));
}

// The same for a finite scheme, by instructions of full rate: the sum with 1.5 * 2^23 rounds to an integer, ties to
// even, which its last bits then are.
__device__ __forceinline__ int8_t integer_of_finite(float x, const Scheme& scheme) {
    const float level = __fmul_rn(__fsub_rn(x, scheme.shift), scheme.inverse);
    return static_cast<int8_t>(__float_as_int(__fadd_rn(level, 0x1.8p23f)) - static_cast<int32_t>(scheme.back));
}

__device__ __forceinline__ float number_of(float level, float scale, float offset) {
    return __fadd_rn(__fmul_rn(level, scale), offset);
}

// Two numbers a byte, the first in the low nibble.
__device__ __forceinline__ uint8_t packed(int8_t low, int8_t high) {
    return static_cast<uint8_t>((low & 0x0F) | (high << 4));
}
__device__ __forceinline__ int8_t low_of(uint8_t byte) { return static_cast<int8_t>(((byte & 0x0F) ^ 8) - 8); }
__device__ __forceinline__ int8_t high_of(uint8_t byte) { return static_cast<int8_t>(((byte >> 4) ^ 8) - 8); }

}  // namespace ds
