// Adam's rule; see [Note: three passes] in common/isa.h. The scalar pass, where a Vec is one number, is the reference
// of the others.
#include "common/update_loops.h"

struct AdamRule {
    Weight one_minus_beta1;
    Vec beta2, one_minus_beta2, step_size, eps, shrink, l2;
    Divisor bias_correction2_sqrt;
    bool has_l2;

    explicit DS_CPU_INLINE_MEMBER AdamRule(const AdamFactors& by)
        : one_minus_beta1(by.one_minus_beta1),
          beta2(splat(by.beta2)),
          one_minus_beta2(splat(by.one_minus_beta2)),
          step_size(splat(by.step_size)),
          eps(splat(by.eps)),
          shrink(splat(by.shrink)),
          l2(splat(by.l2)),
          bias_correction2_sqrt(by.bias_correction2_sqrt),
          has_l2(by.l2 != 0.0f) {}

    // The order of operations is that of torch's fused kernel: fp32 results are equal to the last bit.
    DS_CPU_INLINE_MEMBER void operator()(Vec& param, Vec grad, Vec* states) const {
        if (has_l2) grad = fma(param, l2, grad);
        param = param * shrink;
        const Vec exp_avg = states[0] = lerp(states[0], grad, one_minus_beta1);
        const Vec exp_avg_sq = states[1] = fma(one_minus_beta2 * grad, grad, states[1] * beta2);
        const Vec denominator = sqrt(exp_avg_sq) / bias_correction2_sqrt + eps;
        param = param - step_size * exp_avg / denominator;
    }
};

static void adam_range(const AdamItem& item, int64_t begin, int64_t end) { update_range<AdamRule>(item, begin, end); }
