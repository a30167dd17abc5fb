// Layer norm and RMS norm, each with a form that adds a residual first. Formulas: deepspeed/ops/transformer/norm.py.
#pragma once

#include <tuple>

#include "common/tensors.h"

namespace ds {

struct NormArgs {
    int64_t rows;
    int64_t cols;
    bool centered;  // layer norm: the mean is subtracted
    float eps;
    FloatVector weight;
    FloatVector bias;
    const void* x;
    const void* residual;  // null: none
    void* sum;             // x + residual, where there is one
    void* out;
};

// x + residual, rounded to T as two steps would, and kept: it is the input of the next residual addition.
template <typename T, int N>
__device__ __forceinline__ Pack<T, N> write_sum(const NormArgs& args, const Pack<T, N>& x, const Pack<T, N>& residual,
                                                int64_t at) {
    Pack<float, N> sum;
#pragma unroll
    for (int i = 0; i < N; ++i) sum.at[i] = widen(x.at[i]) + widen(residual.at[i]);
    const Pack<T, N> rounded = narrow<T>(sum);
    write(static_cast<T*>(args.sum) + at, rounded);
    return rounded;
}

template <typename T, int N>
__device__ __forceinline__ void write_normed(const NormArgs& args, const Pack<float, N>& x, float mean, float scale,
                                             int64_t row, int64_t begin) {
    const Pack<float, N> weight = args.weight.get<N>(begin, 1.0f), bias = args.bias.get<N>(begin, 0.0f);
    Pack<float, N> normed;
#pragma unroll
    for (int i = 0; i < N; ++i) normed.at[i] = (x.at[i] - mean) * scale * weight.at[i] + bias.at[i];
    write(static_cast<T*>(args.out) + row * args.cols + begin, narrow<T>(normed));
}

__device__ __forceinline__ float scale_of(const NormArgs& args, float squares) {
    return rsqrtf(squares / static_cast<float>(args.cols) + args.eps);
}

// The part of a row that this thread keeps, with the residual added.
template <typename T, int N, typename Threads>
__device__ __forceinline__ void load_row(const NormArgs& args, int64_t row, Pack<T, N> (&x)[kUnitsOfRow]) {
    const int64_t start = row * args.cols;
    const T* from = static_cast<const T*>(args.x) + start;
    const T* beside = static_cast<const T*>(args.residual) + start;
    each_held<Threads, N>(args.cols, [&](int i, int64_t begin) { x[i] = read<N>(from + begin); });
    if (args.residual == nullptr) return;
    Pack<T, N> residual[kUnitsOfRow];
    each_held<Threads, N>(args.cols, [&](int i, int64_t begin) { residual[i] = read<N>(beside + begin); });
    each_held<Threads, N>(
        args.cols, [&](int i, int64_t begin) { x[i] = write_sum<T, N>(args, x[i], residual[i], start + begin); });
}

// The mean is subtracted before squaring, so that a row far from zero keeps its variance.
template <typename T, int N, bool kByWarp>
__global__ void __launch_bounds__(kByWarp ? kThreadsOfRows : kHoldingThreads) norm_held(NormArgs args) {
    using Threads = RowThreads<kByWarp>;
    const int64_t row = Threads::row();
    if (row >= args.rows) return;  // all threads of a row
    Pack<T, N> x[kUnitsOfRow];
    load_row<T, N, Threads>(args, row, x);
    float mean = 0.0f, squares = 0.0f;
    if (args.centered) {
        each_held<Threads, N>(args.cols,
                              [&](int i, int64_t) { mean += sum_of(widen(x[i]), [](float one) { return one; }); });
        mean = Threads::sum(mean) / static_cast<float>(args.cols);
    }
    each_held<Threads, N>(args.cols, [&](int i, int64_t) {
        squares += sum_of(widen(x[i]), [mean](float one) { return (one - mean) * (one - mean); });
    });
    const float scale = scale_of(args, Threads::sum(squares));
    each_held<Threads, N>(args.cols,
                          [&](int i, int64_t begin) { write_normed<T>(args, widen(x[i]), mean, scale, row, begin); });
}

// N elements of x with the residual added, for a row that no block can hold.
template <typename T, int N>
__device__ __forceinline__ Pack<float, N> norm_input(const NormArgs& args, int64_t at) {
    const Pack<T, N> x = read<N>(static_cast<const T*>(args.x) + at);
    if (args.residual == nullptr) return widen(x);
    return widen(write_sum<T, N>(args, x, read<N>(static_cast<const T*>(args.residual) + at), at));
}

// Such a row is read again, from the second cache: two or three times.
template <typename T, int N>
__global__ void __launch_bounds__(kStreamThreads) norm_streamed(NormArgs args) {
    using Threads = RowThreads<false>;
    const int64_t row = Threads::row();
    const T* source = static_cast<const T*>(args.residual == nullptr ? args.x : args.sum) + row * args.cols;
    float mean = 0.0f, squares = 0.0f;
    if (args.centered || args.residual != nullptr) {
        each_of_row<Threads, N>(args.cols, [&](int64_t begin) {
            mean += sum_of(norm_input<T, N>(args, row * args.cols + begin), [](float one) { return one; });
        });
        mean = args.centered ? Threads::sum(mean) / static_cast<float>(args.cols) : 0.0f;
    }
    each_of_row<Threads, N>(args.cols, [&](int64_t begin) {  // of `sum`, each thread reads what it has written
        squares += sum_of(widen(read<N>(source + begin)), [mean](float one) { return (one - mean) * (one - mean); });
    });
    const float scale = scale_of(args, Threads::sum(squares));
    each_of_row<Threads, N>(args.cols, [&](int64_t begin) {
        write_normed<T>(args, widen(read<N>(source + begin)), mean, scale, row, begin);
    });
}

template <typename T, int N>
static void run_norm(const char* op, const Tensor& x, const NormArgs& args) {
    const OnDevice device(x);
    const int64_t units = divide_up(args.cols, N);
    const RowPlan plan = plan_of(units);
    const auto kernel = plan == RowPlan::kByWarp    ? norm_held<T, N, true>
                        : plan == RowPlan::kByBlock ? norm_held<T, N, false>
                                                    : norm_streamed<T, N>;
    launch(kernel, grid_of({op, "x"}, blocks_of(plan, args.rows)), threads_of(plan, units), device.stream(), args);
}

struct NormResult {
    Tensor out;
    Tensor sum;
};

static NormResult norm(const char* op, const Tensor& x, const Tensor* residual, const std::optional<Tensor>& weight,
                       const std::optional<Tensor>& bias, double eps, bool centered) {
    const Dtype dtype = check_float_on_device({op, "x"}, x);
    const Rows rows = check_rows({op, "x"}, x);
    if (residual != nullptr) {
        check_beside({op, "residual"}, *residual, x, "x");
        check_same_dtype({op, "residual"}, *residual, x, "x");
        check_same_shape({op, "residual"}, *residual, x, "x");
    }
    const HeldVector weights = check_vector({op, "weight"}, weight, rows.cols, x);
    const HeldVector biases = check_vector({op, "bias"}, bias, rows.cols, x);
    const Tensor from = as_contiguous(x), beside = residual != nullptr ? as_contiguous(*residual) : from;
    const NormResult result{new_tensor(x, sizes_of(x)), residual != nullptr ? new_tensor(x, sizes_of(x)) : x};
    const NormArgs args{.rows = rows.count,
                        .cols = rows.cols,
                        .centered = centered,
                        .eps = static_cast<float>(eps),
                        .weight = weights.vector,
                        .bias = biases.vector,
                        .x = from.data_ptr(),
                        .residual = residual != nullptr ? beside.data_ptr() : nullptr,
                        .sum = result.sum.data_ptr(),
                        .out = result.out.data_ptr()};
    by_dtype(dtype, [&](auto one) {
        using T = decltype(one);
        constexpr int N = kWide<T>;
        const bool wide = is_aligned<N>(data_of<T>(from), rows.cols) && is_aligned<N>(data_of<T>(beside), rows.cols) &&
                          args.weight.is_aligned<N>() && args.bias.is_aligned<N>();
        wide ? run_norm<T, N>(op, x, args) : run_norm<T, 1>(op, x, args);
    });
    return result;
}

static Tensor layer_norm(Tensor x, std::optional<Tensor> weight, std::optional<Tensor> bias, double eps) {
    return norm("layer_norm", x, nullptr, weight, bias, eps, /*centered=*/true).out;
}

static std::tuple<Tensor, Tensor> layer_norm_residual(Tensor x, Tensor residual, std::optional<Tensor> weight,
                                                      std::optional<Tensor> bias, double eps) {
    const NormResult result = norm("layer_norm_residual", x, &residual, weight, bias, eps, /*centered=*/true);
    return {result.out, result.sum};
}

static Tensor rms_norm(Tensor x, std::optional<Tensor> weight, double eps) {
    return norm("rms_norm", x, nullptr, weight, std::nullopt, eps, /*centered=*/false).out;
}

static std::tuple<Tensor, Tensor> rms_norm_residual(Tensor x, Tensor residual, std::optional<Tensor> weight,
                                                    double eps) {
    const NormResult result = norm("rms_norm_residual", x, &residual, weight, std::nullopt, eps, /*centered=*/false);
    return {result.out, result.sum};
}

}  // namespace ds
