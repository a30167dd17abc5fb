// gelu and bias-gelu for tensors in host memory. Formulas: deepspeed/ops/transformer/gelu.py.
#pragma once

#include "activation/gelu_args.h"
#include "common/rows.h"

namespace ds_cpu {

static Tensor gelu(Tensor x, bool tanh) {
    const Dtype dtype = check_float_on_host({"gelu", "x"}, x);
    const Tensor from = as_contiguous(x), out = new_tensor(x, sizes_of(x));
    const GeluArgs args{.cols = 0, .tanh = tanh, .bias = nullptr, .x = from.data_ptr(), .out = out.data_ptr()};
    const auto loop = DS_CPU_BY_DTYPE(dtype, gelu_range);
    parallel_for(x.numel(), kGrainElements, [&](int64_t begin, int64_t end) { loop(args, begin, end); });
    return out;
}

static Tensor bias_gelu(Tensor x, Tensor bias, bool tanh) {
    const Dtype dtype = check_float_on_host({"bias_gelu", "x"}, x);
    const Rows rows = check_rows({"bias_gelu", "x"}, x);
    const FloatRow biases({"bias_gelu", "bias"}, bias, rows.cols, 0.0f);
    const Tensor from = as_contiguous(x), out = new_tensor(x, sizes_of(x));
    const GeluArgs args{
        .cols = rows.cols, .tanh = tanh, .bias = biases.data(), .x = from.data_ptr(), .out = out.data_ptr()};
    const auto loop = DS_CPU_BY_DTYPE(dtype, bias_gelu_rows);
    parallel_for(rows.count, grain_of_rows(rows.cols), [&](int64_t begin, int64_t end) { loop(args, begin, end); });
    return out;
}

}  // namespace ds_cpu
