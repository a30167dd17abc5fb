// Adam and AdamW over lists of tensors: `ds_cuda::adam_step_`. Formulas: deepspeed/ops/adam/adam.py.

#include <cmath>

#include "common/capture.h"
#include "common/registration.h"
#include "common/step_items.h"
#include "common/step_loop.h"

namespace ds {

struct AdamShared {
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float eps;
    float shrink;  // 1 - lr * weight_decay with adam_w_mode, else 1
    float l2;      // weight decay added to the gradient; 0 with adam_w_mode
    float grad_scale;
};

struct AdamOwn {
    float step_size;              // lr / (1 - beta1^t)
    float bias_correction2_sqrt;  // sqrt(1 - beta2^t)
};

using AdamItem = StepItem<2, AdamOwn>;
using AdamBatch = Batch<AdamItem, AdamShared>;

// Adam for one element; operations in the order of torch's fused kernel.
struct AdamRule {
    const AdamShared& by;
    const AdamOwn& own;

    __host__ __device__ __forceinline__ void operator()(float& param, float grad, float* states) const {
        if (by.l2 != 0.0f) grad = fmaf(param, by.l2, grad);
        param *= by.shrink;
        const float exp_avg = states[0] = lerp(states[0], grad, by.one_minus_beta1);
        const float exp_avg_sq = states[1] = fmaf(by.one_minus_beta2 * grad, grad, states[1] * by.beta2);
        const float denominator = sqrtf(exp_avg_sq) / own.bias_correction2_sqrt + by.eps;
        param -= own.step_size * exp_avg / denominator;
    }
};

__global__ void __launch_bounds__(kChunkThreads) adam_kernel(const __grid_constant__ AdamBatch batch) {
    const AdamItem& item = batch.items[item_of_block(batch)];
    const AdamRule rule{batch.by, item.own};
    UpdateWork<AdamItem, AdamRule, 2> work{item, rule, batch.by.grad_scale};
    for_chunk(item, work);
}

static void adam_step(std::vector<Tensor> params, std::vector<Tensor> grads, std::vector<Tensor> exp_avgs,
                      std::vector<Tensor> exp_avg_sqs, std::vector<Tensor> steps, std::vector<Tensor> copies, double lr,
                      double beta1, double beta2, double eps, double weight_decay, bool adam_w_mode,
                      bool bias_correction, bool maximize, double grad_scale) {
    const StepLists lists("adam_step_", params);
    std::vector<AdamItem> items =
        lists.items<AdamItem>(grads, copies, StateList{"exp_avgs", exp_avgs}, StateList{"exp_avg_sqs", exp_avg_sqs});
    const std::vector<float*> counts = lists.counts(steps);
    if (params.empty()) return;
    const OnDevice device(params[0]);
    refuse_capture("adam_step_", device.stream());
    for (size_t index = 0; index < items.size(); ++index) {
        const double step = static_cast<double>(*counts[index] += 1.0f);
        // in double, as torch has them
        const double correction1 = bias_correction ? 1 - std::pow(beta1, step) : 1.0;
        const double correction2 = bias_correction ? 1 - std::pow(beta2, step) : 1.0;
        items[index].own = {static_cast<float>(lr / correction1), static_cast<float>(std::sqrt(correction2))};
    }
    const AdamShared by = {
        .one_minus_beta1 = static_cast<float>(1 - beta1),
        .beta2 = static_cast<float>(beta2),
        .one_minus_beta2 = static_cast<float>(1 - beta2),
        .eps = static_cast<float>(eps),
        .shrink = adam_w_mode ? static_cast<float>(1 - lr * weight_decay) : 1.0f,
        .l2 = adam_w_mode ? 0.0f : static_cast<float>(weight_decay),
        .grad_scale = static_cast<float>(maximize ? -grad_scale : grad_scale),
    };
    for_each_batch(items, by, [&](const AdamBatch& batch) {
        launch(adam_kernel, dim3(batch.num_chunks), dim3(kChunkThreads), device.stream(), batch);
    });
}

}  // namespace ds

STABLE_TORCH_LIBRARY_FRAGMENT(ds_cuda, m) {
    m.def(
        "adam_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
        "Tensor(d!)[] steps, Tensor(e!)[] copies, *, float lr, float beta1, float beta2, float eps, "
        "float weight_decay, bool adam_w_mode, bool bias_correction, bool maximize, float grad_scale) -> ()");
}

DS_CUDA_LIBRARY_IMPL(m) { m.impl("adam_step_", TORCH_BOX(&ds::adam_step)); }
