// gelu and bias-gelu for tensors on the device. Formulas: deepspeed/ops/transformer/gelu.py.
#pragma once

#include "activation/gelu_kernel.h"
#include "common/tensors.h"

namespace ds_xpu {

static Tensor run_gelu(const char* op, const Tensor& x, const std::optional<Tensor>& bias, int64_t cols, bool tanh) {
    const Tensor from = as_contiguous(x), out = new_tensor(x, sizes_of(x));
    const GeluArgs args{.numel = x.numel(),
                        .cols = cols,
                        .tanh = tanh,
                        .bias = array_or_none({op, "bias"}, bias),
                        .x = array_of({op, "x"}, from),
                        .out = array_of({op, "out"}, out)};
    if (args.numel > 0) {
        DS_XPU_LAUNCH(current_queue(device_index_of(x)), gelu_kernel, groups_for(args.numel), kGroupSize, args);
    }
    return out;
}

static Tensor gelu(Tensor x, bool tanh) {
    check_on_device({"gelu", "x"}, x);
    return run_gelu("gelu", x, std::nullopt, 1, tanh);
}

static Tensor bias_gelu(Tensor x, Tensor bias, bool tanh) {
    check_on_device({"bias_gelu", "x"}, x);
    const Rows rows = check_rows({"bias_gelu", "x"}, x);
    return run_gelu("bias_gelu", x, check_row({"bias_gelu", "bias"}, bias, x, rows.cols), rows.cols, tanh);
}

}  // namespace ds_xpu
