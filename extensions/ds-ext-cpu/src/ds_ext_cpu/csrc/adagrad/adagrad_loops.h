// Adagrad's rule; see [Note: three passes] in common/isa.h. The scalar pass is the reference of the others.
#include "common/update_loops.h"

struct AdagradRule {
    Vec lr, eps, l2;
    bool has_l2;

    explicit DS_CPU_INLINE_MEMBER AdagradRule(const AdagradFactors& by)
        : lr(splat(by.lr)), eps(splat(by.eps)), l2(splat(by.l2)), has_l2(by.l2 != 0.0f) {}

    DS_CPU_INLINE_MEMBER void operator()(Vec& param, Vec grad, Vec* states) const {
        if (has_l2) grad = fma(param, l2, grad);
        const Vec sum = states[0] = fma(grad, grad, states[0]);
        param = param - quotient(lr * grad, sqrt(sum) + eps);
    }
};

static void adagrad_range(const AdagradItem& item, int64_t begin, int64_t end) {
    update_range<AdagradRule>(item, begin, end);
}
