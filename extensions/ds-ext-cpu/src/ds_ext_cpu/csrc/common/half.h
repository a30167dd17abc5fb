// bf16, fp16 and small integers as storage types, and conversions of halves from and to fp32: branch-free, so that
// plain loops over them vectorize in every pass. Rounding is to nearest, ties to even; NaN stays NaN; overflow gives
// infinity.
#pragma once

#include <cstdint>
#include <cstring>

#define DS_CPU_INLINE static inline __attribute__((always_inline))
#define DS_CPU_INLINE_MEMBER inline __attribute__((always_inline))

namespace ds_cpu {

struct Bf16 {
    uint16_t bits;
};
struct Fp16 {
    uint16_t bits;
};
// Integers that only kernels of quantized weights read: a number of 8 bits, and two of 4 bits, the first of them low.
struct Int8 {
    int8_t value;
};
struct Int4Pair {
    uint8_t bits;
};

DS_CPU_INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

DS_CPU_INLINE float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

DS_CPU_INLINE float widen(float value) { return value; }

DS_CPU_INLINE float widen(Bf16 value) { return float_of(static_cast<uint32_t>(value.bits) << 16); }

// Normal numbers, infinity and NaN: the exponent moves by 2^112 in a multiplication (exact). Subnormal ones: the bits
// become the mantissa of a number near 0.5, whose 0.5 is subtracted (exact). Only normal fp32 numbers occur, so the
// result does not depend on torch.set_flush_denormal.
DS_CPU_INLINE float widen(Fp16 value) {
    const uint32_t shifted = static_cast<uint32_t>(value.bits) << 16;
    const uint32_t sign = shifted & 0x80000000u;
    const uint32_t twice = shifted + shifted;
    const uint32_t normal = bits_of(float_of((twice >> 4) + (0xE0u << 23)) * 0x1.0p-112f);
    const uint32_t subnormal = bits_of(float_of((twice >> 17) | (126u << 23)) - 0.5f);
    return float_of(sign | (twice < (1u << 27) ? subnormal : normal));
}

template <typename T>
T narrow(float value);

template <>
__attribute__((always_inline)) inline float narrow<float>(float value) {
    return value;
}

// Add half of the last kept bit, and one less if that bit is 0 (ties to even); NaN is cut and made quiet.
template <>
__attribute__((always_inline)) inline Bf16 narrow<Bf16>(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const uint32_t quiet_nan = (bits >> 16) | 0x40u;
    return Bf16{static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet_nan : rounded)};
}

// A number is added whose last bit has the weight of the last fp16 bit, so that the addition rounds; the product before
// it turns what is too large into infinity.
template <>
__attribute__((always_inline)) inline Fp16 narrow<Fp16>(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t twice = bits + bits;
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const float scaled = (float_of(bits & 0x7FFFFFFFu) * 0x1.0p+112f) * 0x1.0p-110f;
    const uint32_t exponent = twice & 0xFF000000u;
    const uint32_t bias = exponent < 0x71000000u ? 0x71000000u : exponent;
    const uint32_t sum = bits_of(float_of((bias >> 1) + 0x07800000u) + scaled);
    const uint32_t magnitude = ((sum >> 13) & 0x7C00u) + (sum & 0x0FFFu);
    return Fp16{static_cast<uint16_t>(sign | (twice > 0xFF000000u ? 0x7E00u : magnitude))};
}

}  // namespace ds_cpu
