// The kernel that makes numbers of integers, and adds up several quantized copies of one tensor as it reads them.
#pragma once

#include "common/divide.h"
#include "quantizer/levels.h"

namespace ds {

constexpr int kDequantizeThreads = 256;
// What a thread makes at once, far apart: the reads are under way together.
constexpr int kDequantizeUnits = 2;

struct NumberArgs {
    int64_t numel;  // of the result
    int64_t group_size;
    int64_t group_bytes;
    int64_t num_groups;
    int64_t num_copies;  // added up, in order
    int32_t num_bits;
    int32_t num_params;  // of each group: 1 or 2
    float factor;        // of the sum
    const int8_t* q;
    const float* params;
    void* out;
};

// N integers of 8 or 4 bits as they lie in memory.
template <int N>
struct Packed {
    Pack<int8_t, N> bytes;  // of 4 bits, the first half of them

    // From element `begin` of a group on. N = 1 takes any element; others are even and aligned.
    __device__ __forceinline__ void load(const int8_t* group, int64_t begin, int num_bits) {
        if (num_bits == 8) {
            bytes = read<N>(group + begin);
        } else if constexpr (N == 1) {
            bytes.at[0] = group[begin / 2];
        } else {
            const Pack<int8_t, N / 2> half = read<N / 2>(group + begin / 2);
#pragma unroll
            for (int i = 0; i < N / 2; ++i) bytes.at[i] = half.at[i];
        }
    }

    __device__ __forceinline__ float level(int i, int64_t begin, int num_bits) const {
        if (num_bits == 8) return static_cast<float>(bytes.at[i]);
        const uint8_t byte = static_cast<uint8_t>(bytes.at[i / 2]);
        return static_cast<float>((begin + i) % 2 == 0 ? low_of(byte) : high_of(byte));
    }
};

// The part of a result that a thread makes at once.
template <int N>
struct Part {
    int64_t group;
    int64_t begin;  // within the group; negative: beyond the end
    Pack<float, N> sum;
};

template <int N>
__device__ __forceinline__ void add_copy(const NumberArgs& args, int64_t copy, Part<N> (&parts)[kDequantizeUnits]) {
    Packed<N> q[kDequantizeUnits];
#pragma unroll
    for (int unit = 0; unit < kDequantizeUnits; ++unit) {
        const Part<N>& part = parts[unit];
        const int64_t place = copy * args.num_groups + part.group;
        if (part.begin >= 0) q[unit].load(args.q + place * args.group_bytes, part.begin, args.num_bits);
    }
#pragma unroll
    for (int unit = 0; unit < kDequantizeUnits; ++unit) {
        Part<N>& part = parts[unit];
        if (part.begin < 0) continue;
        const float* params = args.params + (copy * args.num_groups + part.group) * args.num_params;
        const float scale = params[0], offset = args.num_params == 2 ? params[1] : 0.0f;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float level = q[unit].level(i, N == 1 ? part.begin : 0, args.num_bits);
            part.sum.at[i] = __fadd_rn(part.sum.at[i], number_of(level, scale, offset));
        }
    }
}

// N = kWide<T> where every group is a multiple of it and everything is aligned; else 1.
template <typename T, int N>
__global__ void __launch_bounds__(kDequantizeThreads) dequantize(NumberArgs args) {
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kDequantizeUnits * kDequantizeThreads + threadIdx.x;
    Part<N> parts[kDequantizeUnits];
#pragma unroll
    for (int unit = 0; unit < kDequantizeUnits; ++unit) {
        const int64_t at = (first + unit * kDequantizeThreads) * N;
        const int64_t group = quotient(at, args.group_size);
        parts[unit] = {group, at < args.numel ? at - group * args.group_size : -1, {}};
    }
    for (int64_t copy = 0; copy < args.num_copies; ++copy) add_copy(args, copy, parts);
#pragma unroll
    for (int unit = 0; unit < kDequantizeUnits; ++unit) {
        Part<N>& part = parts[unit];
        if (part.begin < 0) continue;
        if (args.factor != 1.0f) {
#pragma unroll
            for (int i = 0; i < N; ++i) part.sum.at[i] = __fmul_rn(part.sum.at[i], args.factor);
        }
        write(static_cast<T*>(args.out) + part.group * args.group_size + part.begin, narrow<T>(part.sum));
    }
}

}  // namespace ds
