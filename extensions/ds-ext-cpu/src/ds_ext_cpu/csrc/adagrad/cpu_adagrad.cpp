// Adagrad for tensors in host memory: `ds_cpu::adagrad_step_`. Formula: deepspeed/ops/adagrad/cpu_adagrad.py.

#include "common/update.h"

namespace ds_cpu {

struct AdagradFactors {
    float lr;  // lr / (1 + (t - 1) * lr_decay)
    float eps;
    float l2;  // weight decay, added to the gradient
};
using AdagradItem = UpdateItem<1, AdagradFactors>;

}  // namespace ds_cpu

#define DS_CPU_LOOPS "adagrad/adagrad_loops.h"
#include "common/each_isa.h"

namespace ds_cpu {

static void adagrad_step(std::vector<Tensor> params, std::vector<Tensor> grads, std::vector<Tensor> sums,
                         std::vector<Tensor> steps, std::vector<Tensor> copies, double lr, double lr_decay, double eps,
                         double weight_decay, bool maximize, double grad_scale) {
    const TensorLists lists("adagrad_step_", params);
    std::vector<AdagradItem> items =
        lists.items<AdagradItem>(grads, copies, maximize ? -grad_scale : grad_scale, StateList{"sums", sums});
    const std::vector<float*> counts = lists.counts(steps);
    const auto update = DS_CPU_CHOOSE(adagrad_range);
    for (size_t index = 0; index < items.size(); ++index) {
        const double step = static_cast<double>(*counts[index] += 1.0f);
        items[index].by = {
            .lr = static_cast<float>(lr / (1 + (step - 1) * lr_decay)),
            .eps = static_cast<float>(eps),
            .l2 = static_cast<float>(weight_decay),
        };
    }
    for_each_block(items, update);
}

}  // namespace ds_cpu

STABLE_TORCH_LIBRARY_FRAGMENT(ds_cpu, m) {
    m.def(
        "adagrad_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] sums, Tensor(c!)[] steps, "
        "Tensor(d!)[] copies, *, float lr, float lr_decay, float eps, float weight_decay, bool maximize, "
        "float grad_scale) -> ()");
}

// Of every device, so that a tensor of another one is refused by name.
STABLE_TORCH_LIBRARY_IMPL(ds_cpu, CompositeExplicitAutograd, m) {
    m.impl("adagrad_step_", TORCH_BOX(&ds_cpu::adagrad_step));
}
