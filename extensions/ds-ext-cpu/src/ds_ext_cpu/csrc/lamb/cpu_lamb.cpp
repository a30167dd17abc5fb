// LAMB for tensors in host memory: `ds_cpu::lamb_step_`. Formula: deepspeed/ops/lamb/fused_lamb.py.

#include <cmath>

#include "common/update.h"

namespace ds_cpu {

struct LambFactors {
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float correction1;  // 1 - beta1^t
    float correction2;  // 1 - beta2^t
    float eps;
    float weight_decay;
    float rate;  // lr * trust ratio, known after the first sweep
    bool eps_inside_sqrt;
};
using LambItem = UpdateItem<2, LambFactors>;

// Sums of squares of the parameter and of its direction, of one block or of all.
struct LambNorms {
    double param = 0.0;
    double direction = 0.0;
};

}  // namespace ds_cpu

#define DS_CPU_LOOPS "lamb/lamb_loops.h"
#include "common/each_isa.h"

namespace ds_cpu {

// The trust ratio |p| / |u| between its bounds; 1 where either norm is 0.
static float trust_ratio(const LambNorms& norms, double min_coeff, double max_coeff) {
    const double param = std::sqrt(norms.param), direction = std::sqrt(norms.direction);
    if (!(param > 0.0 && direction > 0.0)) return 1.0f;
    const double ratio = param / direction;
    return static_cast<float>(ratio < min_coeff ? min_coeff : ratio > max_coeff ? max_coeff : ratio);
}

static void lamb_step(std::vector<Tensor> params, std::vector<Tensor> grads, std::vector<Tensor> exp_avgs,
                      std::vector<Tensor> exp_avg_sqs, std::vector<Tensor> steps, std::vector<Tensor> copies,
                      Tensor coeffs, double lr, double beta1, double beta2, double eps, double weight_decay,
                      bool bias_correction, bool eps_inside_sqrt, double min_coeff, double max_coeff,
                      double grad_scale) {
    const TensorLists lists("lamb_step_", params);
    std::vector<LambItem> items = lists.items<LambItem>(grads, copies, grad_scale, StateList{"exp_avgs", exp_avgs},
                                                        StateList{"exp_avg_sqs", exp_avg_sqs});
    const std::vector<float*> counts = lists.counts(steps);
    float* const ratios = lists.numbers("coeffs", coeffs);
    const auto update_moments = DS_CPU_CHOOSE(lamb_moments);
    const auto update = DS_CPU_CHOOSE(lamb_step_range);
    for (size_t index = 0; index < items.size(); ++index) {
        const double step = static_cast<double>(*counts[index] += 1.0f);
        items[index].by = {
            .one_minus_beta1 = static_cast<float>(1 - beta1),
            .beta2 = static_cast<float>(beta2),
            .one_minus_beta2 = static_cast<float>(1 - beta2),
            .correction1 = bias_correction ? static_cast<float>(1 - std::pow(beta1, step)) : 1.0f,
            .correction2 = bias_correction ? static_cast<float>(1 - std::pow(beta2, step)) : 1.0f,
            .eps = static_cast<float>(eps),
            .weight_decay = static_cast<float>(weight_decay),
            .rate = 0.0f,
            .eps_inside_sqrt = eps_inside_sqrt,
        };
    }
    // One sum for each block, added in order: the ratio does not depend on the number of threads.
    std::vector<std::vector<LambNorms>> norms(items.size());
    for (size_t index = 0; index < items.size(); ++index)
        norms[index].resize((items[index].numel + kBlock - 1) / kBlock);
    for_each_block(items, [&](const LambItem& item, int64_t begin, int64_t end) {
        std::vector<LambNorms>& blocks = norms[&item - items.data()];
        for (int64_t at = begin; at < end; at += kBlock) {
            blocks[at / kBlock] = update_moments(item, at, at + kBlock < end ? at + kBlock : end);
        }
    });
    for (size_t index = 0; index < items.size(); ++index) {
        LambNorms total;
        for (const LambNorms& block : norms[index]) {
            total.param += block.param;
            total.direction += block.direction;
        }
        ratios[index] = trust_ratio(total, min_coeff, max_coeff);
        items[index].by.rate = ratios[index] * static_cast<float>(lr);
    }
    for_each_block(items, update);
}

}  // namespace ds_cpu

STABLE_TORCH_LIBRARY_FRAGMENT(ds_cpu, m) {
    m.def(
        "lamb_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
        "Tensor(d!)[] steps, Tensor(e!)[] copies, Tensor(f!) coeffs, *, float lr, float beta1, float beta2, float eps, "
        "float weight_decay, bool bias_correction, bool eps_inside_sqrt, float min_coeff, float max_coeff, "
        "float grad_scale) -> ()");
}

// Of every device, so that a tensor of another one is refused by name.
STABLE_TORCH_LIBRARY_IMPL(ds_cpu, CompositeExplicitAutograd, m) { m.impl("lamb_step_", TORCH_BOX(&ds_cpu::lamb_step)); }
