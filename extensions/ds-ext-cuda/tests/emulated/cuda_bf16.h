// Stands in for CUDA's header of this name: bf16 by its bits, rounded to nearest even.
#pragma once

#include <bit>
#include <cstdint>

struct __nv_bfloat16 {
    uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 number) {
    return std::bit_cast<float>(static_cast<uint32_t>(number.bits) << 16);
}

inline __nv_bfloat16 __float2bfloat16_rn(float number) {
    const uint32_t bits = std::bit_cast<uint32_t>(number);
    if (number != number) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline __nv_bfloat16 __float2bfloat16(float number) { return __float2bfloat16_rn(number); }

struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
    return {__float2bfloat16_rn(a), __float2bfloat16_rn(b)};
}

// The less or the greater of two, NaN where one is.
inline __nv_bfloat16 __hmin_nan(__nv_bfloat16 a, __nv_bfloat16 b) {
    const float wide_a = __bfloat162float(a), wide_b = __bfloat162float(b);
    return wide_a != wide_a || wide_b != wide_b ? __nv_bfloat16{0x7fff} : (wide_b < wide_a ? b : a);
}
inline __nv_bfloat16 __hmax_nan(__nv_bfloat16 a, __nv_bfloat16 b) {
    const float wide_a = __bfloat162float(a), wide_b = __bfloat162float(b);
    return wide_a != wide_a || wide_b != wide_b ? __nv_bfloat16{0x7fff} : (wide_b > wide_a ? b : a);
}
inline __nv_bfloat162 __hmin2_nan(__nv_bfloat162 a, __nv_bfloat162 b) {
    return {__hmin_nan(a.x, b.x), __hmin_nan(a.y, b.y)};
}
inline __nv_bfloat162 __hmax2_nan(__nv_bfloat162 a, __nv_bfloat162 b) {
    return {__hmax_nan(a.x, b.x), __hmax_nan(a.y, b.y)};
}
