// Lion for tensors in host memory: `ds_cpu::lion_step_`. Formula: deepspeed/ops/lion/lion.py.

#include "common/update.h"

namespace ds_cpu {

struct LionFactors {
    float one_minus_beta1;
    float one_minus_beta2;
    float lr;
    float shrink;  // 1 - lr * weight_decay
};
using LionItem = UpdateItem<1, LionFactors>;

}  // namespace ds_cpu

#define DS_CPU_LOOPS "lion/lion_loops.h"
#include "common/each_isa.h"

namespace ds_cpu {

static void lion_step(std::vector<Tensor> params, std::vector<Tensor> grads, std::vector<Tensor> exp_avgs,
                      std::vector<Tensor> steps, std::vector<Tensor> copies, double lr, double beta1, double beta2,
                      double weight_decay, double grad_scale) {
    const TensorLists lists("lion_step_", params);
    std::vector<LionItem> items = lists.items<LionItem>(grads, copies, grad_scale, StateList{"exp_avgs", exp_avgs});
    const std::vector<float*> counts = lists.counts(steps);
    const auto update = DS_CPU_CHOOSE(lion_range);
    for (size_t index = 0; index < items.size(); ++index) {
        *counts[index] += 1.0f;
        items[index].by = {
            .one_minus_beta1 = static_cast<float>(1 - beta1),
            .one_minus_beta2 = static_cast<float>(1 - beta2),
            .lr = static_cast<float>(lr),
            .shrink = static_cast<float>(1 - lr * weight_decay),
        };
    }
    for_each_block(items, update);
}

}  // namespace ds_cpu

STABLE_TORCH_LIBRARY_FRAGMENT(ds_cpu, m) {
    m.def(
        "lion_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] steps, "
        "Tensor(d!)[] copies, *, float lr, float beta1, float beta2, float weight_decay, float grad_scale) -> ()");
}

// Of every device, so that a tensor of another one is refused by name.
STABLE_TORCH_LIBRARY_IMPL(ds_cpu, CompositeExplicitAutograd, m) { m.impl("lion_step_", TORCH_BOX(&ds_cpu::lion_step)); }
