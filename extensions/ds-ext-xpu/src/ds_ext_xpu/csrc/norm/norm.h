// Layer norm and RMS norm for tensors on the device, each with a form that adds a residual first.
// Formulas: deepspeed/ops/transformer/norm.py.
#pragma once

#include <tuple>

#include "common/tensors.h"
#include "norm/norm_kernel.h"

namespace ds_xpu {

struct NormResult {
    Tensor out;
    Tensor sum;
};

static NormResult norm(const char* op, const Tensor& x, const Tensor* residual, const std::optional<Tensor>& weight,
                       const std::optional<Tensor>& bias, double eps, bool centered) {
    check_on_device({op, "x"}, x);
    const Rows rows = check_rows({op, "x"}, x);
    const std::optional<Tensor> weights = check_row({op, "weight"}, weight, x, rows.cols);
    const std::optional<Tensor> biases = check_row({op, "bias"}, bias, x, rows.cols);
    NormArgs args{.cols = rows.cols,
                  .centered = centered,
                  .eps = static_cast<float>(eps),
                  .x = {},
                  .residual = {},
                  .sum = {},
                  .weight = array_or_none({op, "weight"}, weights),
                  .bias = array_or_none({op, "bias"}, biases),
                  .out = {}};
    const Tensor from = as_contiguous(x);
    args.x = array_of({op, "x"}, from);
    std::optional<Tensor> beside;
    if (residual != nullptr) {
        check_beside({op, "residual"}, *residual, x, "x");
        check_same_shape({op, "residual"}, *residual, x, "x");
        if (dtype_code(*residual) != dtype_code(x)) {
            refuse({op, "residual"}, dtype_name(dtype_code(*residual)), dtype_name(dtype_code(x)) + " as x has");
        }
        beside = as_contiguous(*residual);
        args.residual = array_of({op, "residual"}, *beside);
    }
    const NormResult result{new_tensor(x, sizes_of(x)), residual != nullptr ? new_tensor(x, sizes_of(x)) : x};
    if (residual != nullptr) args.sum = array_of({op, "sum"}, result.sum);
    args.out = array_of({op, "out"}, result.out);
    if (rows.count > 0) {
        DS_XPU_LAUNCH(current_queue(device_index_of(x)), norm_kernel, rows.count, group_size_for(rows.cols), args);
    }
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

}  // namespace ds_xpu
