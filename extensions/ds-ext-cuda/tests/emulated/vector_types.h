// CUDA's vector types and qualifiers, for a host compiler.
#pragma once

#include <cstddef>
#include <cstdint>

#define __global__ __attribute__((visibility("default")))  // so that dladdr knows its name
#define __device__
#define __host__
#define __shared__ static  // one block runs at a time
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) alignas(bytes)

#define DS_EMULATED_VECTORS(T, name)                                                   \
    struct name##1 { T x; };                                                           \
    struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                 \
    struct name##3 { T x, y, z; };                                                     \
    struct alignas(sizeof(T) * 4 > 16 ? 16 : sizeof(T) * 4) name##4 { T x, y, z, w; }; \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                         \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                 \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

DS_EMULATED_VECTORS(signed char, char)
DS_EMULATED_VECTORS(unsigned char, uchar)
DS_EMULATED_VECTORS(short, short)
DS_EMULATED_VECTORS(unsigned short, ushort)
DS_EMULATED_VECTORS(int, int)
DS_EMULATED_VECTORS(unsigned, uint)
DS_EMULATED_VECTORS(long long, longlong)
DS_EMULATED_VECTORS(unsigned long long, ulonglong)
DS_EMULATED_VECTORS(float, float)
DS_EMULATED_VECTORS(double, double)

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 size) : x(size.x), y(size.y), z(size.z) {}
};
