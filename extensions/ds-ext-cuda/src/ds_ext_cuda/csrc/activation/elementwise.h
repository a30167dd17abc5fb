// What is computed element by element: gelu, gelu of a sum with a bias, and the sum of a bias and a residual.
// Formulas: deepspeed/ops/transformer/gelu.py.
#pragma once

#include "common/divide.h"
#include "common/tensors.h"

namespace ds {

constexpr int kElementThreads = 256;
// Wide accesses of a thread, far apart: their reads are under way together.
constexpr int kElementUnits = 2;

enum class Formula : int32_t { kGelu, kGeluTanh, kSum };

struct ElementArgs {
    int64_t numel;
    int64_t cols;  // the bias repeats after so many; 1 where there is none
    Formula formula;
    FloatVector bias;
    const void* x;
    const void* residual;  // null: none
    void* out;
};

__device__ __forceinline__ float gelu_of(float x) { return x * (0.5f * (1.0f + erff(x * 0.70710678118654752f))); }

__device__ __forceinline__ float gelu_tanh_of(float x) {
    const float inner = 0.79788456080286536f * (x + 0.044715f * x * x * x);
    return x * (0.5f * (1.0f + tanhf(inner)));
}

template <typename T, int N>
__device__ __forceinline__ void element_unit(const ElementArgs& args, Pack<float, N> x, int64_t at) {
    if (args.bias.data != nullptr) {
        const Pack<float, N> bias = args.bias.get<N>(remainder(at, args.cols), 0.0f);
#pragma unroll
        for (int i = 0; i < N; ++i) x.at[i] += bias.at[i];
    }
    if (args.residual != nullptr) {
        const Pack<float, N> residual = widen(read<N>(static_cast<const T*>(args.residual) + at));
#pragma unroll
        for (int i = 0; i < N; ++i) x.at[i] += residual.at[i];
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (args.formula == Formula::kGelu) x.at[i] = gelu_of(x.at[i]);
        if (args.formula == Formula::kGeluTanh) x.at[i] = gelu_tanh_of(x.at[i]);
    }
    write(static_cast<T*>(args.out) + at, narrow<T>(x));
}

template <typename T, int N>
__global__ void __launch_bounds__(kElementThreads) element_kernel(ElementArgs args) {
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kElementUnits * kElementThreads + threadIdx.x;
    Pack<T, N> x[kElementUnits];
#pragma unroll
    for (int unit = 0; unit < kElementUnits; ++unit) {
        const int64_t at = (first + unit * kElementThreads) * N;
        if (at < args.numel) x[unit] = read<N>(static_cast<const T*>(args.x) + at);
    }
#pragma unroll
    for (int unit = 0; unit < kElementUnits; ++unit) {
        const int64_t at = (first + unit * kElementThreads) * N;
        if (at < args.numel) element_unit<T, N>(args, widen(x[unit]), at);
    }
}

template <typename T, int N>
static void run_elements(const char* op, const Tensor& x, const ElementArgs& args) {
    const OnDevice device(x);
    const int64_t blocks = divide_up(args.numel, int64_t{kElementThreads} * kElementUnits * N);
    launch(element_kernel<T, N>, grid_of({op, "x"}, blocks), kElementThreads, device.stream(), args);
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
                           .formula = formula,
                           .bias = biases.vector,
                           .x = from.data_ptr(),
                           .residual = residual != nullptr ? beside.data_ptr() : nullptr,
                           .out = out.data_ptr()};
    by_dtype(dtype, [&](auto one) {
        using T = decltype(one);
        constexpr int N = kWide<T>;
        const bool wide = is_aligned<N>(data_of<T>(from), bias.has_value() ? cols : x.numel()) &&
                          is_aligned<N>(data_of<T>(beside), x.numel()) && args.bias.is_aligned<N>();
        wide ? run_elements<T, N>(op, x, args) : run_elements<T, 1>(op, x, args);
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
