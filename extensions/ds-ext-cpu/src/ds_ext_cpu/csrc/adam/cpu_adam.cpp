// Adam and AdamW for tensors in host memory: `ds_cpu::adam_step_`. Formulas: deepspeed/ops/adam/adam.py.

#include <cmath>

#include "common/update.h"

namespace ds_cpu {

struct AdamFactors {
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float step_size;              // lr / (1 - beta1^t)
    float bias_correction2_sqrt;  // sqrt(1 - beta2^t)
    float eps;
    float shrink;  // 1 - lr * weight_decay with adam_w_mode, else 1
    float l2;      // weight decay added to the gradient; 0 with adam_w_mode
};
using AdamItem = UpdateItem<2, AdamFactors>;

}  // namespace ds_cpu

#define DS_CPU_LOOPS "adam/adam_loops.h"
#include "common/each_isa.h"

namespace ds_cpu {

static void adam_step(std::vector<Tensor> params, std::vector<Tensor> grads, std::vector<Tensor> exp_avgs,
                      std::vector<Tensor> exp_avg_sqs, std::vector<Tensor> steps, std::vector<Tensor> copies, double lr,
                      double beta1, double beta2, double eps, double weight_decay, bool adam_w_mode,
                      bool bias_correction, bool maximize, double grad_scale) {
    const TensorLists lists("adam_step_", params);
    std::vector<AdamItem> items =
        lists.items<AdamItem>(grads, copies, maximize ? -grad_scale : grad_scale, StateList{"exp_avgs", exp_avgs},
                              StateList{"exp_avg_sqs", exp_avg_sqs});
    const std::vector<float*> counts = lists.counts(steps);
    const auto update = DS_CPU_CHOOSE(adam_range);
    double last_step = 0, correction1 = 1, correction2 = 1;
    for (size_t index = 0; index < items.size(); ++index) {
        const double step = static_cast<double>(*counts[index] += 1.0f);
        if (bias_correction && step != last_step) {  // nearly always the same for all
            // in double, as torch has them
            correction1 = 1 - std::pow(beta1, step);
            correction2 = 1 - std::pow(beta2, step);
            last_step = step;
        }
        items[index].by = {
            .one_minus_beta1 = static_cast<float>(1 - beta1),
            .beta2 = static_cast<float>(beta2),
            .one_minus_beta2 = static_cast<float>(1 - beta2),
            .step_size = static_cast<float>(lr / correction1),
            .bias_correction2_sqrt = static_cast<float>(std::sqrt(correction2)),
            .eps = static_cast<float>(eps),
            .shrink = adam_w_mode ? static_cast<float>(1 - lr * weight_decay) : 1.0f,
            .l2 = adam_w_mode ? 0.0f : static_cast<float>(weight_decay),
        };
    }
    for_each_block(items, update);
}

}  // namespace ds_cpu

STABLE_TORCH_LIBRARY_FRAGMENT(ds_cpu, m) {
    m.def(
        "adam_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
        "Tensor(d!)[] steps, Tensor(e!)[] copies, *, float lr, float beta1, float beta2, float eps, "
        "float weight_decay, bool adam_w_mode, bool bias_correction, bool maximize, float grad_scale) -> ()");
}

// Of every device, so that a tensor of another one is refused by name.
STABLE_TORCH_LIBRARY_IMPL(ds_cpu, CompositeExplicitAutograd, m) { m.impl("adam_step_", TORCH_BOX(&ds_cpu::adam_step)); }
