// The kernel that makes numbers of integers, and adds up several quantized copies of one tensor as it reads them.
#pragma once

#include "common/divide.h"
#include "quantizer/levels.h"

namespace ds {

constexpr int kDequantizeThreads = 256;
// Numbers that a thread makes of one read: as many as it writes by one access, but of int8 in 16 bits two accesses'
// worth.
template <typename T, int kBits>
constexpr int kDequantizeWidth = kBits == 8 && sizeof(T) == 2 ? 16 : kWide<T>;
// Reads of a thread, far apart: they are under way together.
template <int N>
constexpr int kDequantizeUnits = N == 16 ? 2 : 4;
// At least so many share a multiprocessor.
constexpr int kDequantizeBlocks = 4;

struct NumberArgs {
    int64_t numel;  // of the result
    int64_t group_size;
    int64_t group_bytes;
    int64_t num_groups;
    int64_t num_copies;   // added up, in order
    int64_t step_groups;  // from one unit of a thread to the next: whole groups, and elements
    int64_t step_begin;   //
    int32_t num_params;   // of each group: 1 or 2
    float factor;         // of the sum
    const int8_t* q;
    const float* params;
    void* out;
};

// N integers as they lie in memory, as numbers. Bytes that are not negative become the last bits of 2^23 + byte.
template <int N, int kBits>
__device__ __forceinline__ Pack<float, N> levels_of(const Pack<uint8_t, N * kBits / 8>& q) {
    constexpr bool kHalves = kBits == 4;
    constexpr float kZero = 0x1p23f + (kHalves ? 8.0f : 128.0f);
    constexpr int kBytes = N * kBits / 8, kWords = kBytes < 4 ? 1 : kBytes / 4;
    uint32_t words[kWords] = {};
    memcpy(words, &q, kBytes);
    Pack<float, N> levels;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int byte = kHalves ? i / 2 : i;
        uint32_t word = words[byte / 4] ^ (kHalves ? 0x88888888u : 0x80808080u);
        if (kHalves) word = (i % 2 == 0 ? word : word >> 4) & 0x0f0f0f0fu;
        levels.at[i] = __fsub_rn(__uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + byte % 4)), kZero);
    }
    return levels;
}

// Any one integer of a group.
template <int kBits>
__device__ __forceinline__ float level_at(const int8_t* group, int64_t at) {
    if constexpr (kBits == 8) return static_cast<float>(group[at]);
    const uint8_t byte = static_cast<uint8_t>(group[at / 2]);
    return static_cast<float>(at % 2 == 0 ? low_of(byte) : high_of(byte));
}

// From one unit of a thread to its next.
__device__ __forceinline__ void to_next_unit(const NumberArgs& args, int64_t& group, int64_t& begin) {
    group += args.step_groups;
    begin += args.step_begin;
    if (begin < args.group_size) return;
    begin -= args.group_size;
    ++group;
}

// One copy, without a factor: each unit is read, then each is written. N = 1 takes any group; with another, every group
// is a multiple of it, so that q has no gaps.
template <typename T, int N, int kBits>
__device__ __forceinline__ void write_numbers(const NumberArgs& args, int64_t first, int64_t group, int64_t begin) {
    constexpr int kStep = kDequantizeThreads * N;
    [[maybe_unused]] Pack<uint8_t, N == 1 ? 1 : N * kBits / 8> q[kDequantizeUnits<N>];
    float level[kDequantizeUnits<N>], scale[kDequantizeUnits<N>], offset[kDequantizeUnits<N>];
#pragma unroll
    for (int unit = 0; unit < kDequantizeUnits<N>; ++unit) {
        if (first + unit * kStep >= args.numel) continue;
        if constexpr (N > 1) {
            const auto from = reinterpret_cast<const uint8_t*>(args.q) + first * kBits / 8;
            q[unit] = read<N * kBits / 8>(from + unit * (kStep * kBits / 8));
        } else {
            level[unit] = level_at<kBits>(args.q + group * args.group_bytes, begin);
        }
        scale[unit] = args.params[group * args.num_params];
        offset[unit] = args.num_params == 2 ? args.params[group * 2 + 1] : 0.0f;
        to_next_unit(args, group, begin);
    }
#pragma unroll
    for (int unit = 0; unit < kDequantizeUnits<N>; ++unit) {
        if (first + unit * kStep >= args.numel) continue;
        Pack<float, N> numbers;
        if constexpr (N > 1) {
            numbers = levels_of<N, kBits>(q[unit]);
        } else {
            numbers.at[0] = level[unit];
        }
#pragma unroll
        for (int i = 0; i < N; ++i) numbers.at[i] = number_of(numbers.at[i], scale[unit], offset[unit]);
        write(static_cast<T*>(args.out) + first + unit * kStep, narrow<T>(numbers));
    }
}

// N neighbours of the sum of all copies.
template <int N, int kBits>
__device__ __forceinline__ Pack<float, N> sum_of_copies(const NumberArgs& args, int64_t group, int64_t begin) {
    Pack<float, N> sum = {};
#pragma unroll 4
    for (int64_t copy = 0; copy < args.num_copies; ++copy) {
        const int64_t place = copy * args.num_groups + group;
        const float scale = args.params[place * args.num_params];
        const float offset = args.num_params == 2 ? args.params[place * 2 + 1] : 0.0f;
        Pack<float, N> levels;
        if constexpr (N > 1) {
            const auto of_group = reinterpret_cast<const uint8_t*>(args.q) + place * args.group_bytes;
            levels = levels_of<N, kBits>(read<N * kBits / 8>(of_group + begin * kBits / 8));
        } else {
            levels.at[0] = level_at<kBits>(args.q + place * args.group_bytes, begin);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) sum.at[i] = __fadd_rn(sum.at[i], number_of(levels.at[i], scale, offset));
    }
    return sum;
}

// N > 1 where every group is a multiple of it and everything is aligned.
template <typename T, int N, int kBits>
__global__ void __launch_bounds__(kDequantizeThreads, kDequantizeBlocks) dequantize(NumberArgs args) {
    constexpr int kStep = kDequantizeThreads * N;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * (kDequantizeUnits<N> * kStep) + threadIdx.x * N;
    int64_t group = quotient(first, args.group_size), begin = first - group * args.group_size;
    if (args.num_copies == 1) {  // no factor either
        write_numbers<T, N, kBits>(args, first, group, begin);
        return;
    }
#pragma unroll 1
    for (int unit = 0; unit < kDequantizeUnits<N> && first + unit * kStep < args.numel; ++unit) {
        Pack<float, N> sum = sum_of_copies<N, kBits>(args, group, begin);
        if (args.factor != 1.0f) {
#pragma unroll
            for (int i = 0; i < N; ++i) sum.at[i] = __fmul_rn(sum.at[i], args.factor);
        }
        write(static_cast<T*>(args.out) + first + unit * kStep, narrow<T>(sum));
        to_next_unit(args, group, begin);
    }
}

}  // namespace ds
