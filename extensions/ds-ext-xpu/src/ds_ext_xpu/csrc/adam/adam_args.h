// What the Adam kernel is given. Formulas: deepspeed/ops/adam/adam.py.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace ds_xpu {

// Tensors of one launch: as many as the arguments of a kernel may hold, 2 KiB on every Intel GPU.
constexpr int kTensorsPerLaunch = 16;
// Elements of one work-group.
constexpr int64_t kAdamChunk = 4096;

struct AdamItem {
    int64_t numel = 0;
    float* exp_avg = nullptr;
    float* exp_avg_sq = nullptr;
    void* param = nullptr;
    void* grad = nullptr;
    void* copy = nullptr;  // gets the new value, rounded; null: none
    Dtype param_dtype = Dtype::kFp32;
    Dtype grad_dtype = Dtype::kFp32;
    Dtype copy_dtype = Dtype::kFp32;
    float step_size = 0;              // lr / (1 - beta1^t)
    float bias_correction2_sqrt = 1;  // sqrt(1 - beta2^t)
    int32_t first_group = 0;          // of the launch's work-groups
};

struct AdamArgs {
    AdamItem items[kTensorsPerLaunch];  // those after `num_items` are empty
    int32_t num_items = 0;
    float grad_scale = 1;  // the gradient is multiplied by it as it is read
    float one_minus_beta1 = 0;
    float beta2 = 0;
    float one_minus_beta2 = 0;
    float eps = 0;
    float shrink = 1;  // 1 - lr * weight_decay with adam_w_mode, else 1
    float l2 = 0;      // weight decay added to the gradient; 0 with adam_w_mode
};

static_assert(sizeof(AdamArgs) <= 2048, "kernel arguments of more than 2 KiB are refused by some devices");

}  // namespace ds_xpu
