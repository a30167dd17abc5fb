// Stands in for CUDA's header of this name: fp16 by its bits, rounded to nearest even.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

struct __half {
    uint16_t bits;
};

inline float __half2float(__half number) {
    const uint32_t sign = (number.bits & 0x8000u) << 16, exponent = number.bits >> 10 & 31, rest = number.bits & 1023;
    if (exponent == 0) {
        const float small = static_cast<float>(rest) * 0x1p-24f;
        return sign ? -small : small;
    }
    const uint32_t wide = exponent == 31 ? 255 : exponent + 112;
    return std::bit_cast<float>(sign | wide << 23 | rest << 13);
}

inline __half __float2half_rn(float number) {
    const uint32_t bits = std::bit_cast<uint32_t>(number), magnitude = bits & 0x7fffffffu;
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
    if (number != number) return {0x7fff};
    if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // 65520 and above: infinity
    if (magnitude < 0x38800000u) {                                                 // below 2^-14: multiples of 2^-24
        const float steps = std::nearbyint(std::bit_cast<float>(magnitude) * 0x1p24f);
        return {static_cast<uint16_t>(sign | static_cast<uint16_t>(steps))};
    }
    const uint32_t rounded = magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1);
    return {static_cast<uint16_t>(sign | rounded >> 13)};
}

inline __half __float2half(float number) { return __float2half_rn(number); }

struct alignas(4) __half2 {
    __half x, y;
};

inline __half2 __floats2half2_rn(float a, float b) { return {__float2half_rn(a), __float2half_rn(b)}; }

// The less or the greater of two, NaN where one is.
inline __half __hmin_nan(__half a, __half b) {
    const float wide_a = __half2float(a), wide_b = __half2float(b);
    return wide_a != wide_a || wide_b != wide_b ? __half{0x7fff} : (wide_b < wide_a ? b : a);
}
inline __half __hmax_nan(__half a, __half b) {
    const float wide_a = __half2float(a), wide_b = __half2float(b);
    return wide_a != wide_a || wide_b != wide_b ? __half{0x7fff} : (wide_b > wide_a ? b : a);
}
inline __half2 __hmin2_nan(__half2 a, __half2 b) { return {__hmin_nan(a.x, b.x), __hmin_nan(a.y, b.y)}; }
inline __half2 __hmax2_nan(__half2 a, __half2 b) { return {__hmax_nan(a.x, b.x), __hmax_nan(a.y, b.y)}; }
