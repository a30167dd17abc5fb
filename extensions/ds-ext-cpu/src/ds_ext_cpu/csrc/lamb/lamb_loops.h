// LAMB in two sweeps: moments and norms, then the step; see [Note: three passes] in common/isa.h. The scalar pass is
// the reference of the others.
#include "common/update_loops.h"

struct LambRule {
    Weight one_minus_beta1;
    Vec beta2, one_minus_beta2, eps, weight_decay, rate;
    Divisor correction1, correction2;
    bool eps_inside_sqrt;

    explicit DS_CPU_INLINE_MEMBER LambRule(const LambFactors& by)
        : one_minus_beta1(by.one_minus_beta1),
          beta2(splat(by.beta2)),
          one_minus_beta2(splat(by.one_minus_beta2)),
          eps(splat(by.eps)),
          weight_decay(splat(by.weight_decay)),
          rate(splat(by.rate)),
          correction1(by.correction1),
          correction2(by.correction2),
          eps_inside_sqrt(by.eps_inside_sqrt) {}

    DS_CPU_INLINE_MEMBER void update_moments(Vec grad, Vec* states) const {
        states[0] = lerp(states[0], grad, one_minus_beta1);
        states[1] = fma(one_minus_beta2 * grad, grad, states[1] * beta2);
    }

    DS_CPU_INLINE_MEMBER Vec direction(Vec param, const Vec* states) const {
        const Vec second = states[1] / correction2;
        const Vec denominator = eps_inside_sqrt ? sqrt(second + eps) : sqrt(second) + eps;
        return fma(param, weight_decay, states[0] / correction1 / denominator);
    }

    // The second sweep: the moments are done, and the gradient is not read again.
    DS_CPU_INLINE_MEMBER void operator()(Vec& param, const Vec* states) const {
        param = param - direction(param, states) * rate;
    }
};

// Sums of squares are kept by lane in fp32 over a block of 1024 elements, and in fp64 from there on.
DS_CPU_INLINE double fp64_sum_of_lanes(Vec a) {
    float lanes[Vec::kSize];
    store(lanes, a);
    double sum = 0.0;
    for (int64_t lane = 0; lane < Vec::kSize; ++lane) sum += static_cast<double>(lanes[lane]);
    return sum;
}

// First sweep over one block: updates the moments, and gives |p|^2 and |u|^2 of the block.
static LambNorms lamb_moments(const LambItem& item, int64_t begin, int64_t end) {
    const LambRule rule(item.by);
    const Vec grad_scale = splat(item.grad_scale);
    float* const exp_avgs = item.states[0];
    float* const exp_avg_sqs = item.states[1];
    Vec param_squares = splat(0.0f), direction_squares = splat(0.0f);
    int64_t at = begin;
    for (; at + Vec::kSize <= end; at += Vec::kSize) {
        const Vec param = load(item.param, at);
        Vec states[2] = {load(exp_avgs + at), load(exp_avg_sqs + at)};
        rule.update_moments(load(item.grad, at) * grad_scale, states);
        store(exp_avgs + at, states[0]);
        store(exp_avg_sqs + at, states[1]);
        const Vec direction = rule.direction(param, states);
        param_squares = fma(param, param, param_squares);
        direction_squares = fma(direction, direction, direction_squares);
    }
    LambNorms norms = {fp64_sum_of_lanes(param_squares), fp64_sum_of_lanes(direction_squares)};
    if (at < end) {
        const int64_t count = end - at;
        const Vec param = load_part(item.param, at, count);
        Vec states[2] = {load_part(exp_avgs + at, count), load_part(exp_avg_sqs + at, count)};
        rule.update_moments(load_part(item.grad, at, count) * grad_scale, states);
        store_part(exp_avgs + at, states[0], count);
        store_part(exp_avg_sqs + at, states[1], count);
        // lanes without an element hold 0 / 0 with eps = 0: they must not reach the sum
        float directions[Vec::kSize];
        store(directions, rule.direction(param, states));
        norms.param += fp64_sum_of_lanes(param * param);
        for (int64_t lane = 0; lane < count; ++lane) {
            norms.direction += static_cast<double>(directions[lane]) * static_cast<double>(directions[lane]);
        }
    }
    return norms;
}

// Second sweep: the step, with `rate` in the factors.
static void lamb_step_range(const LambItem& item, int64_t begin, int64_t end) {
    const LambRule rule(item.by);
    const float* const exp_avgs = item.states[0];
    const float* const exp_avg_sqs = item.states[1];
    int64_t at = begin;
    for (; at + Vec::kSize <= end; at += Vec::kSize) {
        Vec param = load(item.param, at);
        const Vec states[2] = {load(exp_avgs + at), load(exp_avg_sqs + at)};
        rule(param, states);
        store(item.param, at, param);
        if (item.copy.data != nullptr) store(item.copy, at, param);
    }
    if (at < end) {
        const int64_t count = end - at;
        Vec param = load_part(item.param, at, count);
        const Vec states[2] = {load_part(exp_avgs + at, count), load_part(exp_avg_sqs + at, count)};
        rule(param, states);
        store_part(item.param, at, param, count);
        if (item.copy.data != nullptr) store_part(item.copy, at, param, count);
    }
}
