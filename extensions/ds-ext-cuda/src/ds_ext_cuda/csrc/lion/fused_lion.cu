// Lion over lists of tensors: `ds_cuda::lion_step_`. Formula: deepspeed/ops/lion/lion.py.

#include "common/capture.h"
#include "common/registration.h"
#include "common/step_items.h"
#include "common/step_loop.h"

namespace ds {

struct LionShared {
    float one_minus_beta1;
    float one_minus_beta2;
    float lr;
    float shrink;  // 1 - lr * weight_decay
    float grad_scale;
};

struct LionOwn {};

using LionItem = StepItem<1, LionOwn>;
using LionBatch = Batch<LionItem, LionShared>;

// Lion for one element; `states` is the momentum.
struct LionRule {
    const LionShared& by;

    __host__ __device__ __forceinline__ void operator()(float& param, float grad, float* states) const {
        const float mixed = lerp(states[0], grad, by.one_minus_beta1);
        const float direction = mixed > 0.0f ? 1.0f : mixed < 0.0f ? -1.0f : mixed;  // 0 and nan stay
        param = param * by.shrink - direction * by.lr;
        states[0] = lerp(states[0], grad, by.one_minus_beta2);
    }
};

__global__ void __launch_bounds__(kChunkThreads) lion_kernel(const __grid_constant__ LionBatch batch) {
    const LionItem& item = batch.items[item_of_block(batch)];
    const LionRule rule{batch.by};
    UpdateWork<LionItem, LionRule, 1> work{item, rule, batch.by.grad_scale};
    for_chunk(item, work);
}

static void lion_step(std::vector<Tensor> params, std::vector<Tensor> grads, std::vector<Tensor> exp_avgs,
                      std::vector<Tensor> steps, std::vector<Tensor> copies, double lr, double beta1, double beta2,
                      double weight_decay, double grad_scale) {
    const StepLists lists("lion_step_", params);
    const std::vector<LionItem> items = lists.items<LionItem>(grads, copies, StateList{"exp_avgs", exp_avgs});
    const std::vector<float*> counts = lists.counts(steps);
    if (params.empty()) return;
    const OnDevice device(params[0]);
    refuse_capture("lion_step_", device.stream());
    for (float* count : counts) *count += 1.0f;
    const LionShared by = {
        .one_minus_beta1 = static_cast<float>(1 - beta1),
        .one_minus_beta2 = static_cast<float>(1 - beta2),
        .lr = static_cast<float>(lr),
        .shrink = static_cast<float>(1 - lr * weight_decay),
        .grad_scale = static_cast<float>(grad_scale),
    };
    for_each_batch(items, by, [&](const LionBatch& batch) {
        launch(lion_kernel, dim3(batch.num_chunks), dim3(kChunkThreads), device.stream(), batch);
    });
}

}  // namespace ds

STABLE_TORCH_LIBRARY_FRAGMENT(ds_cuda, m) {
    m.def(
        "lion_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] steps, "
        "Tensor(d!)[] copies, *, float lr, float beta1, float beta2, float weight_decay, float grad_scale) -> ()");
}

DS_CUDA_LIBRARY_IMPL(m) { m.impl("lion_step_", TORCH_BOX(&ds::lion_step)); }
