// gelu and bias-gelu, an element by a work-item. Formulas: deepspeed/ops/transformer/gelu.py.
#pragma once

#include "activation/gelu_args.h"
#include "common/kernel.h"

namespace ds_xpu {

inline float gelu_of(float x, bool tanh) {
    if (tanh) {
        const float inner = 0.7978845608f * (x + 0.044715f * x * x * x);  // sqrt(2 / pi)
        return 0.5f * x * (1.0f + sycl::tanh(inner));
    }
    return 0.5f * x * (1.0f + sycl::erf(x * 0.7071067812f));  // 1 / sqrt(2)
}

DS_XPU_KERNEL void gelu_kernel(GeluArgs args) {
    const int64_t at = static_cast<int64_t>(this_item().get_global_id(0));
    if (at >= args.numel) return;
    float x = load(args.x, at);
    if (args.bias.data != nullptr) x += load(args.bias, at - divide(at, args.cols) * args.cols);
    store(args.out, at, gelu_of(x, args.tanh));
}

}  // namespace ds_xpu
