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
