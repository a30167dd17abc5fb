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

// Of numbers of 16 bits two are compared at once; a NaN stays in both.
template <typename T>
struct Pairs {
    static constexpr bool kHas = false;
};
template <>
struct Pairs<Bf16> {
    static constexpr bool kHas = true;
    static constexpr uint32_t kInfinities = 0x7f807f80u;
    using Pair = __nv_bfloat162;
};
template <>
struct Pairs<Fp16> {
    static constexpr bool kHas = true;
    static constexpr uint32_t kInfinities = 0x7c007c00u;
    using Pair = __half2;
};

template <typename T>
struct RangeOfPairs {
    using Pair = typename Pairs<T>::Pair;
    uint32_t low = Pairs<T>::kInfinities;
    uint32_t high = Pairs<T>::kInfinities | 0x80008000u;

    template <int N>
    __device__ __forceinline__ void include(const Pack<T, N>& pack) {
        const auto words = as_bits<Pack<uint32_t, N / 2>>(pack);
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            const Pair pair = as_bits<Pair>(words.at[i]);
            low = as_bits<uint32_t>(__hmin2_nan(as_bits<Pair>(low), pair));
            high = as_bits<uint32_t>(__hmax2_nan(as_bits<Pair>(high), pair));
        }
    }

    __device__ __forceinline__ Range range() const {
        const auto lows = widen(as_bits<Pack<T, 2>>(low)), highs = widen(as_bits<Pack<T, 2>>(high));
        return {min(key_of(lows.at[0]), key_of(lows.at[1])), max(key_of(highs.at[0]), key_of(highs.at[1]))};
    }

    static __device__ __forceinline__ int32_t key_of(float number) { return order_key(__float_as_int(number)); }
};

// Over `lanes` neighbours, a power of two up to a warp's size. Every lane of the warp calls.
__device__ __forceinline__ Range joined_by_lanes(Range range, int lanes) {
    if (lanes == kWarpSize) return {__reduce_min_sync(kAllLanes, range.low), __reduce_max_sync(kAllLanes, range.high)};
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

// Of a finite scheme, by instructions of full rate: a sum with 1.5 * 2^23 rounds to an integer, ties to even, which its
// last bits then are. `plus`, an even integer, is added to it.
__device__ __forceinline__ uint32_t integer_bits(float x, const Scheme& scheme, float plus) {
    const float level = __fmul_rn(__fsub_rn(x, scheme.shift), scheme.inverse);
    return __float_as_uint(__fadd_rn(level, 0x1.8p23f + plus));
}

// N integers of a finite scheme as they lie in memory.
template <int N, int kBits>
__device__ __forceinline__ Pack<uint8_t, N * kBits / 8> integers_of(const Pack<float, N>& x, const Scheme& scheme) {
    constexpr bool kHalves = kBits == 4;  // a nibble has 8 more than its integer, so that it is not negative
    uint32_t bits[N];
#pragma unroll
    for (int i = 0; i < N; ++i) bits[i] = integer_bits(x.at[i], scheme, (kHalves ? 8.0f : 0.0f) - scheme.back);
    if constexpr (kHalves) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) bits[i] = bits[2 * i] + (bits[2 * i + 1] << 4);
    }
    constexpr int kBytes = N * kBits / 8;
    Pack<uint8_t, kBytes> found;
    if constexpr (kBytes == 2) {
        found = as_bits<Pack<uint8_t, 2>>(static_cast<uint16_t>(__byte_perm(bits[0], bits[1], 0x0040) ^ 0x8888u));
    } else {
        Pack<uint32_t, kBytes / 4> words;
#pragma unroll
        for (int i = 0; i < kBytes; i += 4) {
            const uint32_t low = __byte_perm(bits[i], bits[i + 1], 0x0040);
            const uint32_t word = __byte_perm(low, __byte_perm(bits[i + 2], bits[i + 3], 0x0040), 0x5410);
            words.at[i / 4] = kHalves ? word ^ 0x88888888u : word;
        }
        found = as_bits<Pack<uint8_t, kBytes>>(words);
    }
    return found;
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
