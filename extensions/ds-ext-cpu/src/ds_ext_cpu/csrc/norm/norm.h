// Layer norm and RMS norm for tensors in host memory, each with a form that adds a residual first.
// Formulas: deepspeed/ops/transformer/norm.py.
#pragma once

#include "common/rows.h"
#include "norm/norm_args.h"

namespace ds_cpu {

struct NormResult {
    Tensor out;
    Tensor sum;
};

static NormResult norm(const char* op, const Tensor& x, const Tensor* residual, const std::optional<Tensor>& weight,
                       const std::optional<Tensor>& bias, double eps, bool centered) {
    const Dtype dtype = check_float_on_host({op, "x"}, x);
    const Rows rows = check_rows({op, "x"}, x);
    if (residual != nullptr) {
        check_on_host({op, "residual"}, *residual);
        check_same_dtype({op, "residual"}, *residual, x, "x");
        check_same_shape({op, "residual"}, *residual, x, "x");
    }
    const FloatRow weights({op, "weight"}, weight, rows.cols, 1.0f), biases({op, "bias"}, bias, rows.cols, 0.0f);
    const Tensor from = as_contiguous(x), beside = residual != nullptr ? as_contiguous(*residual) : from;
    const NormResult result{new_tensor(x, sizes_of(x)), residual != nullptr ? new_tensor(x, sizes_of(x)) : x};
    const NormArgs args{.cols = rows.cols,
                        .centered = centered,
                        .eps = static_cast<float>(eps),
                        .weight = weights.data(),
                        .bias = biases.data(),
                        .x = from.data_ptr(),
                        .residual = residual != nullptr ? beside.data_ptr() : nullptr,
                        .sum = result.sum.data_ptr(),
                        .out = result.out.data_ptr()};
    const auto loop = DS_CPU_BY_DTYPE(dtype, norm_rows);
    parallel_for(rows.count, grain_of_rows(rows.cols), [&](int64_t begin, int64_t end) { loop(args, begin, end); });
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

}  // namespace ds_cpu
