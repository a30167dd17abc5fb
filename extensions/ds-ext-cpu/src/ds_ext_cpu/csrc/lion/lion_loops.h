// Lion's rule; see [Note: three passes] in common/isa.h. The scalar pass is the reference of the others.
#include "common/update_loops.h"

struct LionRule {
    Weight one_minus_beta1, one_minus_beta2;
    Vec lr, shrink;

    explicit DS_CPU_INLINE_MEMBER LionRule(const LionFactors& by)
        : one_minus_beta1(by.one_minus_beta1),
          one_minus_beta2(by.one_minus_beta2),
          lr(splat(by.lr)),
          shrink(splat(by.shrink)) {}

    DS_CPU_INLINE_MEMBER void operator()(Vec& param, Vec grad, Vec* states) const {
        const Vec direction = sign(lerp(states[0], grad, one_minus_beta1));
        param = param * shrink - direction * lr;
        states[0] = lerp(states[0], grad, one_minus_beta2);
    }
};

static void lion_range(const LionItem& item, int64_t begin, int64_t end) { update_range<LionRule>(item, begin, end); }
