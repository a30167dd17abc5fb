// Lion for one element (Chen et al., arXiv 2302.06675, algorithm 2), in fp32:
//
//     p <- p * (1 - lr * wd) - lr * sign(b1 * m + (1 - b1) * g)
//     m <- b2 * m + (1 - b2) * g
//
// No header of torch: the compiler of a device reads it too.
#pragma once

#if defined(__CUDACC__)
    #define DS_LION_FUNCTION __host__ __device__ inline
#else
    #define DS_LION_FUNCTION inline
#endif

struct LionFactors {
    float one_minus_beta1;
    float one_minus_beta2;
    float lr;
    float shrink;      // 1 - lr * weight_decay
    float grad_scale;  // unscales and clips the gradient
};

// As torch computes it, so that both give the same bits.
DS_LION_FUNCTION float lion_lerp(float from, float to, float weight) {
    return weight < 0.5f ? from + weight * (to - from) : to - (to - from) * (1.0f - weight);
}

DS_LION_FUNCTION void lion_element(float& param, float grad, float& exp_avg, const LionFactors& by) {
    grad *= by.grad_scale;
    const float direction = lion_lerp(exp_avg, grad, by.one_minus_beta1);
    const float sign = direction > 0.0f ? 1.0f : (direction < 0.0f ? -1.0f : direction);  // nan stays nan
    param = param * by.shrink - by.lr * sign;
    exp_avg = lion_lerp(exp_avg, grad, by.one_minus_beta2);
}
