// One Adam step of several tensors. Formulas: deepspeed/ops/adam/adam.py.
#pragma once

#include "adam/adam_args.h"
#include "common/kernel.h"

namespace ds_xpu {

// a + weight * (b - a) as torch.lerp rounds it: from the end that is nearer.
inline float lerp(float a, float b, float weight) {
    return weight < 0.5f ? sycl::fma(weight, b - a, a) : sycl::fma(weight - 1.0f, b - a, b);
}

// The order of operations is that of torch's fused kernel.
inline float adam_update(const AdamArgs& args, const AdamItem& item, int64_t at, float param, float grad) {
    if (args.l2 != 0.0f) grad = sycl::fma(param, args.l2, grad);
    param *= args.shrink;
    const float exp_avg = lerp(item.exp_avg[at], grad, args.one_minus_beta1);
    const float square = args.one_minus_beta2 * grad;
    const float exp_avg_sq = sycl::fma(square, grad, item.exp_avg_sq[at] * args.beta2);
    item.exp_avg[at] = exp_avg;
    item.exp_avg_sq[at] = exp_avg_sq;
    const float denominator = sycl::sqrt(exp_avg_sq) / item.bias_correction2_sqrt + args.eps;
    return param - item.step_size * exp_avg / denominator;
}

// One work-group for each `kAdamChunk` elements of a tensor.
DS_XPU_KERNEL void adam_step_kernel(AdamArgs args) {
    const sycl::nd_item<1> here = this_item();
    const int32_t group = static_cast<int32_t>(here.get_group(0));
    // Compared with every tensor, and no index into `args.items` that only a work-item knows: that would put the
    // arguments into the memory of each work-item.
    AdamItem item = args.items[0];
    DS_XPU_UNROLL
    for (int index = 1; index < kTensorsPerLaunch; ++index) {
        if (index < args.num_items && args.items[index].first_group <= group) item = args.items[index];
    }
    const FloatArray params{item.param, item.param_dtype}, grads{item.grad, item.grad_dtype};
    const FloatArray copies{item.copy, item.copy_dtype};
    const int64_t begin = (group - item.first_group) * kAdamChunk;
    const int64_t end = sycl::min(begin + kAdamChunk, item.numel);
    for (int64_t at = begin + here.get_local_id(0); at < end; at += here.get_local_range(0)) {
        const float param = adam_update(args, item, at, load(params, at), load(grads, at) * args.grad_scale);
        store(params, at, param);
        if (copies.data != nullptr) store(copies, at, param);
    }
}

}  // namespace ds_xpu
