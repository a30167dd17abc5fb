// A small operator; found by the folder that sycl_kernel_include names.
#pragma once

#include <torch/csrc/stable/library.h>

inline void step(torch::stable::Tensor param, torch::stable::Tensor grad, double lr) {
    float* params = static_cast<float*>(param.data_ptr());
    const float* grads = static_cast<const float*>(grad.data_ptr());
    for (int64_t i = 0; i < param.numel(); ++i) params[i] -= static_cast<float>(lr) * grads[i];
}
