// The kernel that makes numbers of integers, and adds up several quantized copies of one tensor as it reads them.
#pragma once

#include "common/divide.h"
#include "quantizer/levels.h"

namespace ds {

constexpr int kDequantizeThreads = 256;
// Wide writes of a thread, far apart: their reads are under way together.
constexpr int kDequantizeUnits = 4;

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

// N integers from element `begin` of a group on, as fp32. N = 1 takes any element; others are even and aligned.
template <int N>
__device__ __forceinline__ Pack<float, N> integers_at(const int8_t* group, int64_t begin, int num_bits) {
    Pack<float, N> wide;
    if (num_bits == 8) {
        const Pack<int8_t, N> integers = read<N>(group + begin);
#pragma unroll
        for (int i = 0; i < N; ++i) wide.at[i] = static_cast<float>(integers.at[i]);
    } else if constexpr (N == 1) {
        const uint8_t byte = static_cast<uint8_t>(group[begin / 2]);
        wide.at[0] = static_cast<float>(begin % 2 == 0 ? low_of(byte) : high_of(byte));
    } else {
        const Pack<uint8_t, N / 2> bytes = read<N / 2>(reinterpret_cast<const uint8_t*>(group) + begin / 2);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            wide.at[i] = static_cast<float>(i % 2 == 0 ? low_of(bytes.at[i / 2]) : high_of(bytes.at[i / 2]));
        }
    }
    return wide;
}

template <int N>
__device__ __forceinline__ Pack<float, N> sum_of_copies(const NumberArgs& args, int64_t group, int64_t begin) {
    Pack<float, N> sum = {};
#pragma unroll 4
    for (int64_t copy = 0; copy < args.num_copies; ++copy) {
        const int64_t place = copy * args.num_groups + group;
        const float scale = args.params[place * args.num_params];
        const float offset = args.num_params == 2 ? args.params[place * args.num_params + 1] : 0.0f;
        const Pack<float, N> levels = integers_at<N>(args.q + place * args.group_bytes, begin, args.num_bits);
#pragma unroll
        for (int i = 0; i < N; ++i) sum.at[i] = __fadd_rn(sum.at[i], number_of(levels.at[i], scale, offset));
    }
    return sum;
}

// N = kWide<T> where every group is a multiple of it and everything is aligned; else 1.
template <typename T, int N>
__global__ void __launch_bounds__(kDequantizeThreads) dequantize(NumberArgs args) {
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kDequantizeUnits * kDequantizeThreads + threadIdx.x;
#pragma unroll
    for (int unit = 0; unit < kDequantizeUnits; ++unit) {
        const int64_t at = (first + unit * kDequantizeThreads) * N;
        if (at >= args.numel) return;
        const int64_t group = quotient(at, args.group_size);
        Pack<float, N> sum = sum_of_copies<N>(args, group, at - group * args.group_size);
        if (args.factor != 1.0f) {
#pragma unroll
            for (int i = 0; i < N; ++i) sum.at[i] = __fmul_rn(sum.at[i], args.factor);
        }
        write(static_cast<T*>(args.out) + at, narrow<T>(sum));
    }
}

}  // namespace ds
