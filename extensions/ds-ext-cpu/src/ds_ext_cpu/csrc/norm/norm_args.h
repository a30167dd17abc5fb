// What the loop of the norms is given. Formulas: deepspeed/ops/transformer/norm.py.
#pragma once

#include <cstdint>

namespace ds_cpu {

struct NormArgs {
    int64_t cols;
    bool centered;  // layer norm: the mean is subtracted
    float eps;
    const float* weight;
    const float* bias;
    const void* x;
    const void* residual;  // null: none
    void* sum;             // x + residual, where there is one
    void* out;
};

}  // namespace ds_cpu
