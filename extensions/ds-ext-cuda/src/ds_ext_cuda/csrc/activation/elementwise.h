// What is computed element by element: gelu, gelu of a sum with a bias, and the sum of a bias and a residual.
// Formulas: deepspeed/ops/transformer/gelu.py.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/divide.h"
#include "common/tensors.h"

namespace ds {

constexpr int kElementThreads = 256;
// Wide accesses of a thread, far apart: their reads are under way together.
constexpr int kElementUnits = 2;
// At least so many share a multiprocessor.
constexpr int kElementBlocks = 6;

enum class Formula : int32_t { kGelu, kGeluTanh, kSum };

struct ElementArgs {
    int64_t numel;
    int64_t cols;  // the bias repeats after so many; 1 where there is none
    int64_t step;  // from one unit of a thread to the next, within `cols`
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

// What is added to a thread's units. A kind of bias is chosen once, so that all reads are under way together.
template <int N, typename B>
__device__ __forceinline__ void read_bias(const ElementArgs& args, int64_t first, Pack<B, N> (&bias)[kElementUnits]) {
    int64_t col = remainder(first, args.cols);
#pragma unroll
    for (int unit = 0; unit < kElementUnits; ++unit) {
        bias[unit] = read<N>(static_cast<const B*>(args.bias.data) + col);
        col += args.step;
        if (col >= args.cols) col -= args.cols;
    }
}

template <int N>
__device__ __forceinline__ void add(Pack<float, N>& x, const Pack<float, N>& other) {
#pragma unroll
    for (int i = 0; i < N; ++i) x.at[i] += other.at[i];
}

// `B`: the dtype of the bias, or `NoBias`.
struct NoBias {};

template <typename T, int N, Formula kFormula, typename B>
__device__ __forceinline__ void element_units(const ElementArgs& args, int64_t block_first) {
    const int64_t first = block_first + static_cast<int64_t>(threadIdx.x) * N;
    constexpr int kStep = kElementThreads * N;
    Pack<T, N> x[kElementUnits];
    [[maybe_unused]] Pack<T, N> residual[kElementUnits];
    [[maybe_unused]] Pack<std::conditional_t<std::is_same_v<B, NoBias>, T, B>, N> bias[kElementUnits];
#pragma unroll
    for (int unit = 0; unit < kElementUnits; ++unit) {
        if (first + unit * kStep < args.numel) x[unit] = read<N>(static_cast<const T*>(args.x) + first + unit * kStep);
    }
    if constexpr (kFormula == Formula::kSum) {
#pragma unroll
        for (int unit = 0; unit < kElementUnits; ++unit) {
            const int64_t at = first + unit * kStep;
            if (at < args.numel) residual[unit] = read<N>(static_cast<const T*>(args.residual) + at);
        }
    }
    if constexpr (!std::is_same_v<B, NoBias>) read_bias<N, B>(args, first, bias);
#pragma unroll
    for (int unit = 0; unit < kElementUnits; ++unit) {
        const int64_t at = first + unit * kStep;
        if (at >= args.numel) return;
        Pack<float, N> wide = widen(x[unit]);
        if constexpr (!std::is_same_v<B, NoBias>) add(wide, widen(bias[unit]));
        if constexpr (kFormula == Formula::kSum) add(wide, widen(residual[unit]));
#pragma unroll
        for (int i = 0; i < N; ++i) wide.at[i] = formula_of<kFormula>(wide.at[i]);
        write(static_cast<T*>(args.out) + at, narrow<T>(wide));
    }
}

template <typename T, int N, Formula kFormula>
__global__ void __launch_bounds__(kElementThreads, kElementBlocks) element_kernel(ElementArgs args) {
    const int64_t first = static_cast<int64_t>(blockIdx.x) * (kElementUnits * kElementThreads * N);
    if (args.bias.data == nullptr) {
        element_units<T, N, kFormula, NoBias>(args, first);
    } else if (args.bias.dtype == Dtype::kFp32) {
        element_units<T, N, kFormula, float>(args, first);
    } else if (args.bias.dtype == Dtype::kBf16) {
        element_units<T, N, kFormula, Bf16>(args, first);
    } else {
        element_units<T, N, kFormula, Fp16>(args, first);
    }
}

template <typename T, int N>
static void run_elements(const char* op, const Tensor& x, ElementArgs args, Formula formula) {
    const OnDevice device(x);
    args.step = int64_t{kElementThreads} * N % std::max<int64_t>(args.cols, 1);
    const auto kernel = formula == Formula::kGelu       ? element_kernel<T, N, Formula::kGelu>
                        : formula == Formula::kGeluTanh ? element_kernel<T, N, Formula::kGeluTanh>
                                                        : element_kernel<T, N, Formula::kSum>;
    const int64_t blocks = divide_up(args.numel, int64_t{kElementThreads} * kElementUnits * N);
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
