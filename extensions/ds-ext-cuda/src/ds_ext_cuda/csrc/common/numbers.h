// fp32, fp16 and bf16 in device code: conversion, and reading and writing several at once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifndef DS_CUDA_EMULATED
    #define DS_EMULATED_CHECK(condition, text)
#endif

namespace ds {

using Fp16 = __half;
using Bf16 = __nv_bfloat16;

__device__ __forceinline__ float widen(float number) { return number; }
__device__ __forceinline__ float widen(Fp16 number) { return __half2float(number); }
__device__ __forceinline__ float widen(Bf16 number) { return __bfloat162float(number); }

// To nearest, ties to even.
template <typename T>
__device__ __forceinline__ T narrow(float number);
template <>
__device__ __forceinline__ float narrow<float>(float number) {
    return number;
}
template <>
__device__ __forceinline__ Fp16 narrow<Fp16>(float number) {
    return __float2half_rn(number);
}
template <>
__device__ __forceinline__ Bf16 narrow<Bf16>(float number) {
    return __float2bfloat16_rn(number);
}

// 2^x and 1 / x by one instruction each, to about 2^-22 of the value; what lies below 2^-126 counts as 0.
__device__ __forceinline__ float fast_exp2(float x) {
#ifdef DS_CUDA_EMULATED
    return std::exp2(x);
#else
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
#endif
}

__device__ __forceinline__ float fast_reciprocal(float x) {
#ifdef DS_CUDA_EMULATED
    return 1.0f / x;
#else
    float reciprocal;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
    return reciprocal;
#endif
}

// The widest access a thread has.
constexpr int kAccessBytes = 16;
template <typename T>
constexpr int kWide = kAccessBytes / static_cast<int>(sizeof(T));

// N elements that are read or written together: by one access up to 16 bytes, beyond by several.
template <typename T, int N>
struct alignas(sizeof(T) * N < kAccessBytes ? sizeof(T) * N : kAccessBytes) Pack {
    T at[N];
};

// Bits of the same size as another type.
template <typename To, typename From>
__device__ __forceinline__ To as_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "of one size");
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}

// N elements from an address that is a multiple of what one access takes of them.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> read(const T* from) {
    DS_EMULATED_CHECK(reinterpret_cast<uintptr_t>(from) % alignof(Pack<T, N>) == 0, "misaligned read");
    return *reinterpret_cast<const Pack<T, N>*>(from);
}

template <typename T, int N>
__device__ __forceinline__ void write(T* to, const Pack<T, N>& pack) {
    DS_EMULATED_CHECK(reinterpret_cast<uintptr_t>(to) % alignof(Pack<T, N>) == 0, "misaligned write");
    *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

template <typename T, int N>
__device__ __forceinline__ Pack<float, N> widen(const Pack<T, N>& pack) {
    Pack<float, N> wide;
#pragma unroll
    for (int i = 0; i < N; ++i) wide.at[i] = widen(pack.at[i]);
    return wide;
}

// Two of them share a word: a shift and a mask.
template <int N>
__device__ __forceinline__ Pack<float, N> widen(const Pack<Bf16, N>& pack) {
    Pack<float, N> wide;
    if constexpr (N % 2 == 0) {
        const auto words = as_bits<Pack<uint32_t, N / 2>>(pack);
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            wide.at[i] = __uint_as_float(words.at[i / 2] << 16);
            wide.at[i + 1] = __uint_as_float(words.at[i / 2] & 0xffff0000u);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) wide.at[i] = widen(pack.at[i]);
    }
    return wide;
}

template <typename T, int N>
__device__ __forceinline__ Pack<T, N> narrow(const Pack<float, N>& wide) {
    if constexpr (sizeof(T) == 2 && N % 2 == 0) {
        Pack<uint32_t, N / 2> words;
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            if constexpr (std::is_same_v<T, Bf16>) {
                words.at[i / 2] = as_bits<uint32_t>(__floats2bfloat162_rn(wide.at[i], wide.at[i + 1]));
            } else {
                words.at[i / 2] = as_bits<uint32_t>(__floats2half2_rn(wide.at[i], wide.at[i + 1]));
            }
        }
        return as_bits<Pack<T, N>>(words);
    } else {
        Pack<T, N> pack;
#pragma unroll
        for (int i = 0; i < N; ++i) pack.at[i] = narrow<T>(wide.at[i]);
        return pack;
    }
}

// N elements as words, for what is kept: of parts of words the compiler would keep each in a register of its own.
template <typename T, int N>
using Words = std::conditional_t<sizeof(T) * N % 4 == 0, Pack<uint32_t, (sizeof(T) * N + 3) / 4>, Pack<T, N>>;

// Whether rows of `cols` elements that begin at `pointer` can be read N at a time.
template <int N, typename T>
inline bool is_aligned(const T* pointer, int64_t cols) {
    return reinterpret_cast<uintptr_t>(pointer) % alignof(Pack<T, N>) == 0 && cols % N == 0;
}

}  // namespace ds
