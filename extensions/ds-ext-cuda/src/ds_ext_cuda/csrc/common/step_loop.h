// What the optimizer kernels share on the device: through a block's chunk with 16-byte accesses. A formula is one
// `Rule` for one element, which says itself where it multiplies and adds in one rounding: nvcc fuses nothing
// (`--fmad=false`), so that a number does not depend on the GPU, nor on where in a tensor it stands.
#pragma once

#include <cmath>

#include "common/numbers.h"
#include "common/step_items.h"

namespace ds {

// N numbers as they lie in memory, of a dtype known when the kernel runs. They are widened apart from being read, so
// that a thread waits once, when all of its reads are on their way.
template <int N>
union RawNumbers {
    static constexpr int kPart = N < 4 ? N : 4;
    Pack<float, kPart> fp32[N / kPart];
    Pack<Bf16, N> bf16;
    Pack<Fp16, N> fp16;
};

template <int N>
__device__ __forceinline__ RawNumbers<N> read_raw(const void* from, Dtype dtype, int64_t at) {
    RawNumbers<N> raw;
    if (dtype == Dtype::kFp32) {
        constexpr int kPart = RawNumbers<N>::kPart;
#pragma unroll
        for (int part = 0; part < N / kPart; ++part) {
            raw.fp32[part] = read<kPart>(static_cast<const float*>(from) + at + part * kPart);
        }
    } else if (dtype == Dtype::kBf16) {
        raw.bf16 = read<N>(static_cast<const Bf16*>(from) + at);
    } else {
        raw.fp16 = read<N>(static_cast<const Fp16*>(from) + at);
    }
    return raw;
}

template <int N>
__device__ __forceinline__ void widen_raw(float (&to)[N], const RawNumbers<N>& raw, Dtype dtype) {
    if (dtype == Dtype::kFp32) {
#pragma unroll
        for (int i = 0; i < N; ++i) to[i] = raw.fp32[i / RawNumbers<N>::kPart].at[i % RawNumbers<N>::kPart];
    } else if (dtype == Dtype::kBf16) {
#pragma unroll
        for (int i = 0; i < N; ++i) to[i] = widen(raw.bf16.at[i]);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) to[i] = widen(raw.fp16.at[i]);
    }
}

// Rounded to nearest.
template <int N>
__device__ __forceinline__ void write_numbers(void* to, Dtype dtype, int64_t at, const float (&numbers)[N]) {
    RawNumbers<N> raw;
    if (dtype == Dtype::kFp32) {
        constexpr int kPart = RawNumbers<N>::kPart;
#pragma unroll
        for (int i = 0; i < N; ++i) raw.fp32[i / kPart].at[i % kPart] = numbers[i];
#pragma unroll
        for (int part = 0; part < N / kPart; ++part) {
            write(static_cast<float*>(to) + at + part * kPart, raw.fp32[part]);
        }
    } else if (dtype == Dtype::kBf16) {
#pragma unroll
        for (int i = 0; i < N; ++i) raw.bf16.at[i] = narrow<Bf16>(numbers[i]);
        write(static_cast<Bf16*>(to) + at, raw.bf16);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) raw.fp16.at[i] = narrow<Fp16>(numbers[i]);
        write(static_cast<Fp16*>(to) + at, raw.fp16);
    }
}

// Calls `work.run<N>(at)` for the elements of this block's chunk: N of them from `at` on, N 8 or 1.
template <typename Item, typename Work>
__device__ __forceinline__ void for_chunk(const Item& item, Work& work) {
    const auto [begin, count] = chunk_of_block(item);
    const int num_wide = item.is_aligned ? count / kStepWide : 0;
    const int thread = static_cast<int>(threadIdx.x), num_threads = static_cast<int>(blockDim.x);
    for (int wide = thread; wide < num_wide; wide += num_threads) {
        work.template run<kStepWide>(begin + wide * kStepWide);
    }
    for (int at = num_wide * kStepWide + thread; at < count; at += num_threads) work.template run<1>(begin + at);
}

// Reads N elements of a parameter, its gradient (if `kWithGrad`) and its states; `widen` gives them as fp32.
template <int N, int kStates>
struct StepNumbers {
    float param[N];
    float grad[N];
    float states[kStates][N];

    template <bool kWithGrad, typename Item>
    __device__ __forceinline__ void read_from(const Item& item, int64_t at) {
        const RawNumbers<N> raw_param = read_raw<N>(item.param, item.param_dtype, at);
        RawNumbers<N> raw_grad;
        if constexpr (kWithGrad) raw_grad = read_raw<N>(item.grad, item.grad_dtype, at);
        RawNumbers<N> raw_states[kStates];
#pragma unroll
        for (int number = 0; number < kStates; ++number) {
            raw_states[number] = read_raw<N>(item.states[number], Dtype::kFp32, at);
        }
        widen_raw(param, raw_param, item.param_dtype);
        if constexpr (kWithGrad) widen_raw(grad, raw_grad, item.grad_dtype);
#pragma unroll
        for (int number = 0; number < kStates; ++number) widen_raw(states[number], raw_states[number], Dtype::kFp32);
    }

    template <typename Item>
    __device__ __forceinline__ void write_states(const Item& item, int64_t at) const {
#pragma unroll
        for (int number = 0; number < kStates; ++number) {
            write_numbers(item.states[number], Dtype::kFp32, at, states[number]);
        }
    }

    template <typename Item>
    __device__ __forceinline__ void write_param(const Item& item, int64_t at) const {
        write_numbers(item.param, item.param_dtype, at, param);
        if (item.copy != nullptr) write_numbers(item.copy, item.copy_dtype, at, param);
    }
};

// One pass over a chunk: `rule(param, grad, states)` updates one element.
template <typename Item, typename Rule, int kStates>
struct UpdateWork {
    const Item& item;
    const Rule& rule;
    float grad_scale;

    template <int N>
    __device__ __forceinline__ void run(int64_t at) {
        StepNumbers<N, kStates> numbers;
        numbers.template read_from<true>(item, at);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            float states[kStates];
#pragma unroll
            for (int number = 0; number < kStates; ++number) states[number] = numbers.states[number][i];
            rule(numbers.param[i], numbers.grad[i] * grad_scale, states);
#pragma unroll
            for (int number = 0; number < kStates; ++number) numbers.states[number][i] = states[number];
        }
        numbers.write_states(item, at);
        numbers.write_param(item, at);
    }
};

// a + weight * (b - a), as torch.lerp rounds it: from the end that is nearer.
__host__ __device__ __forceinline__ float lerp(float a, float b, float weight) {
    const float difference = b - a;
    return weight < 0.5f ? fmaf(weight, difference, a) : fmaf(weight - 1.0f, difference, b);
}

}  // namespace ds
