// Layer norm and RMS norm of one row by a work-group. Formulas: deepspeed/ops/transformer/norm.py.
#pragma once

#include "common/kernel.h"
#include "norm/norm_args.h"

namespace ds_xpu {

// Memory is read once: the later looks at a row find it in cache. A work-item reads only what it wrote itself.
DS_XPU_KERNEL void norm_kernel(NormArgs args) {
    const sycl::nd_item<1> here = this_item();
    const sycl::group<1> group = here.get_group();
    const int64_t first = static_cast<int64_t>(here.get_local_id(0)), stride = here.get_local_range(0);
    const int64_t row = static_cast<int64_t>(group.get_group_id(0)) * args.cols;
    const float count = static_cast<float>(args.cols);
    FloatArray x = args.x;
    if (args.residual.data != nullptr) {
        for (int64_t i = first; i < args.cols; i += stride) {
            store(args.sum, row + i, load(args.x, row + i) + load(args.residual, row + i));
        }
        x = args.sum;
    }
    float mean = 0.0f;
    if (args.centered) {
        float part = 0.0f;
        for (int64_t i = first; i < args.cols; i += stride) part += load(x, row + i);
        mean = sycl::reduce_over_group(group, part, sycl::plus<float>()) / count;
    }
    float part = 0.0f;
    for (int64_t i = first; i < args.cols; i += stride) {
        const float distance = load(x, row + i) - mean;
        part = sycl::fma(distance, distance, part);
    }
    const float squares = sycl::reduce_over_group(group, part, sycl::plus<float>());
    const float scale = 1.0f / sycl::sqrt(squares / count + args.eps);
    for (int64_t i = first; i < args.cols; i += stride) {
        float normed = (load(x, row + i) - mean) * scale;
        if (args.weight.data != nullptr) normed *= load(args.weight, i);
        if (args.bias.data != nullptr) normed += load(args.bias, i);
        store(args.out, row + i, normed);
    }
}

}  // namespace ds_xpu
