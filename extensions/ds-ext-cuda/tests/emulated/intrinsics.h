// Arithmetic, atomic and memory functions of device code. One thread runs at a time, so that plain code is atomic.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <stdexcept>

#include "block.h"

// Kernels say by it what hardware would fault on; thrown, with the thread's index.
#define DS_EMULATED_CHECK(condition, text)                                                          \
    do {                                                                                            \
        if (!(condition)) {                                                                         \
            throw std::runtime_error(ds_emulated::at(std::source_location::current()) + ": " text); \
        }                                                                                           \
    } while (false)

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __powf(float a, float b) { return std::pow(a, b); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline int __float2int_rn(float x) { return x == x ? static_cast<int>(std::nearbyint(x)) : 0; }
inline float __int2float_rn(int x) { return static_cast<float>(x); }

inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }

// Four of the eight bytes of b and a, each by a digit of `choice`; the form that repeats a sign is not here.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned choice) {
    const uint64_t both = uint64_t{b} << 32 | a;
    unsigned found = 0;
    for (int i = 0; i < 4; ++i) found |= static_cast<unsigned>(both >> (8 * (choice >> (4 * i) & 7)) & 0xff) << (8 * i);
    return found;
}

// Overloads of the global namespace, as CUDA has them.
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }

template <typename T>
T __ldg(const T* from) {
    DS_EMULATED_CHECK(reinterpret_cast<uintptr_t>(from) % alignof(T) == 0, "misaligned read");
    return *from;
}
template <typename T>
T __ldcs(const T* from) {
    return __ldg(from);
}
template <typename T>
T __ldcg(const T* from) {
    return __ldg(from);
}
template <typename T>
void __stcs(T* to, T value) {
    DS_EMULATED_CHECK(reinterpret_cast<uintptr_t>(to) % alignof(T) == 0, "misaligned write");
    *to = value;
}

inline void __threadfence() {}
inline void __threadfence_block() {}
[[noreturn]] inline void __trap() { throw std::runtime_error("__trap()"); }

// Each gives the value from before.
template <typename T>
T atomicAdd(T* at, T value) {
    const T before = *at;
    *at = before + value;
    return before;
}
template <typename T>
T atomicMax(T* at, T value) {
    const T before = *at;
    *at = before > value ? before : value;
    return before;
}
template <typename T>
T atomicMin(T* at, T value) {
    const T before = *at;
    *at = before < value ? before : value;
    return before;
}
template <typename T>
T atomicOr(T* at, T value) {
    const T before = *at;
    *at = before | value;
    return before;
}
template <typename T>
T atomicExch(T* at, T value) {
    const T before = *at;
    *at = value;
    return before;
}
template <typename T>
T atomicCAS(T* at, T expected, T value) {
    const T before = *at;
    if (before == expected) *at = value;
    return before;
}
