// What is computed element by element: gelu, gelu of a sum with a bias, and the sum of a bias and a residual.
// Formulas: deepspeed/ops/transformer/gelu.py.
#pragma once

#include <type_traits>

#include "common/divide.h"
#include "common/tensors.h"

namespace ds {

constexpr int kElementThreads = 256;
// At least so many blocks share a multiprocessor.
constexpr int kElementBlocks = 8;

enum class Formula : int32_t { kGelu, kGeluTanh, kSum };

struct ElementArgs {
    int64_t numel;
    int64_t cols;  // the bias repeats after so many; 1 where there is none
    FloatVector bias;
    const void* x;
    const void* residual;  // null: none
    void* out;
};

__device__ __forceinline__ float gelu_of(float x) { return x * (0.5f * (1.0f + erff(x * 0.70710678118654752f))); }

// x (1 + tanh(u)) / 2 = x / (1 + exp(-2 u)), where u = sqrt(2 / pi) (x + 0.044715 x^3); powers of 2 in place of e.
__device__ __forceinline__ float gelu_tanh_of(float x) {
    const float exponent = x * __fmaf_rn(x * x, -0.10294324f, -2.3022082f);
    return x * fast_reciprocal(1.0f + fast_exp2(exponent));
}

template <Formula kFormula>
__device__ __forceinline__ float formula_of(float x) {
    if constexpr (kFormula == Formula::kGelu) return gelu_of(x);
    if constexpr (kFormula == Formula::kGeluTanh) return gelu_tanh_of(x);
    return x;
}

template <int N>
__device__ __forceinline__ void add(Pack<float, N>& x, const Pack<float, N>& other) {
#pragma unroll
    for (int i = 0; i < N; ++i) x.at[i] += other.at[i];
}

// One wide access of a thread. `B`: the dtype of the bias, or `NoBias`; chosen once, so that all reads are under way
// together.
struct NoBias {};

template <typename T, int N, Formula kFormula, typename B>
__device__ __forceinline__ void element_unit(const ElementArgs& args) {
    const int64_t at = (static_cast<int64_t>(blockIdx.x) * kElementThreads + threadIdx.x) * N;
    if (at >= args.numel) return;
    Pack<float, N> x = widen(read<N>(static_cast<const T*>(args.x) + at));
    if constexpr (!std::is_same_v<B, NoBias>) {
        add(x, widen(read<N>(static_cast<const B*>(args.bias.data) + remainder(at, args.cols))));
    }
    if constexpr (kFormula == Formula::kSum) add(x, widen(read<N>(static_cast<const T*>(args.residual) + at)));
#pragma unroll
    for (int i = 0; i < N; ++i) x.at[i] = formula_of<kFormula>(x.at[i]);
    write(static_cast<T*>(args.out) + at, narrow<T>(x));
}

template <typename T, int N, Formula kFormula>
__global__ void __launch_bounds__(kElementThreads, kElementBlocks) element_kernel(ElementArgs args) {
    if (args.bias.data == nullptr) {
        element_unit<T, N, kFormula, NoBias>(args);
    } else if (args.bias.dtype == Dtype::kFp32) {
        element_unit<T, N, kFormula, float>(args);
    } else if (args.bias.dtype == Dtype::kBf16) {
        element_unit<T, N, kFormula, Bf16>(args);
    } else {
        element_unit<T, N, kFormula, Fp16>(args);
    }
}

template <typename T, int N>
static void run_elements(const char* op, const Tensor& x, const ElementArgs& args, Formula formula) {
    const OnDevice device(x);
    const auto kernel = formula == Formula::kGelu       ? element_kernel<T, N, Formula::kGelu>
                        : formula == Formula::kGeluTanh ? element_kernel<T, N, Formula::kGeluTanh>
                                                        : element_kernel<T, N, Formula::kSum>;
    const int64_t blocks = divide_up(args.numel, int64_t{kElementThreads} * N);
    launch(kernel, grid_of({op, "x"}, blocks), kElementThreads, device.stream(), args);
}

static Tensor elements(const char* op, const Tensor& x, const std::optional<Tensor>& bias, const Tensor* residual,
                       Formula formula) {
    const Dtype dtype = check_float_on_device({op, "x"}, x);
    const int64_t cols = bias.has_value() ? check_rows({op, "x"}, x).cols : 1;
    const HeldVector biases = check_vector({op, "bias"}, bias, cols, x);
    if (residual != nullptr) {
        check_beside({op, "residual"}, *residual, x, "x");
        check_same_dtype({op, "residual"}, *residual, x, "x");
        check_same_shape({op, "residual"}, *residual, x, "x");
    }
    const Tensor from = as_contiguous(x), beside = residual != nullptr ? as_contiguous(*residual) : from;
    const Tensor out = new_tensor(x, sizes_of(x));
    const ElementArgs args{.numel = x.numel(),
                           .cols = cols,
                           .bias = biases.vector,
                           .x = from.data_ptr(),
                           .residual = residual != nullptr ? beside.data_ptr() : nullptr,
                           .out = out.data_ptr()};
    by_dtype(dtype, [&](auto one) {
        using T = decltype(one);
        constexpr int N = kWide<T>;
        const bool wide = is_aligned<N>(data_of<T>(from), bias.has_value() ? cols : x.numel()) &&
                          is_aligned<N>(data_of<T>(beside), x.numel()) && args.bias.is_aligned<N>();
        wide ? run_elements<T, N>(op, x, args, formula) : run_elements<T, 1>(op, x, args, formula);
    });
    return out;
}

static Tensor gelu(Tensor x, bool tanh) {
    return elements("gelu", x, std::nullopt, nullptr, tanh ? Formula::kGeluTanh : Formula::kGelu);
}

static Tensor bias_gelu(Tensor x, Tensor bias, bool tanh) {
    return elements("bias_gelu", x, bias, nullptr, tanh ? Formula::kGeluTanh : Formula::kGelu);
}

// x + bias + residual, added in fp32 and rounded once: the end of a transformer's sublayer.
static Tensor bias_residual_add(Tensor x, std::optional<Tensor> bias, Tensor residual) {
    return elements("bias_residual_add", x, bias, &residual, Formula::kSum);
}

}  // namespace ds
