// The door between the host's code and the kernel: plain C, so that two compilers agree on it.
#pragma once

#include <cstdint>

#include "lion/lion_formula.h"

extern "C" void lion_kernel(float* param, const float* grad, float* exp_avg, int64_t numel, const LionFactors* by);
