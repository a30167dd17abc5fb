// What the operator hands to the device: one parameter at a time, with what belongs to it.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "lion/lion_formula.h"

namespace ds_{{ cookiecutter.device_name }} {

using torch::stable::Tensor;

// Contiguous, of equal size, on one device; exp_avg in fp32, the others in fp32, bf16 or fp16.
struct LionTensors {
    Tensor param;
    Tensor grad;
    Tensor exp_avg;
    const Tensor* copy;  // null, or gets the new parameter, rounded to its dtype
};

// One step of one parameter, in place.
void step(LionTensors& tensors, const LionFactors& by);

}  // namespace ds_{{ cookiecutter.device_name }}
