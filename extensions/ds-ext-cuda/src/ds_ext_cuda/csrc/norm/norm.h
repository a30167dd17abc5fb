// Layer norm and RMS norm, each with a form that adds a residual first. Formulas: deepspeed/ops/transformer/norm.py.
#pragma once

#include <tuple>

#include "norm/held_rows.h"

namespace ds {

// With fewer rows, a block to each uses more of the card than a warp.
constexpr int64_t kManyRows = 1024;

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
    if constexpr (N == kWide<T>) {
        if (plan == RowPlan::kByBlock && units <= kUnitsOfLongRow * kWarpSize && args.rows >= kManyRows &&
            args.residual == nullptr && has_own_vectors<T>(args)) {
            const int64_t blocks = divide_up(args.rows, kThreadsOfLongRows / kWarpSize);
            launch(norm_long<T, N>, grid_of({op, "x"}, blocks), kThreadsOfLongRows, device.stream(), args);
            return;
        }
    }
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
