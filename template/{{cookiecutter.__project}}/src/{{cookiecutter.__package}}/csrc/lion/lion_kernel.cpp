// The kernel: {{ 'what ' + cookiecutter.compiler + ' compiles' if cookiecutter.kernel_language == 'own' else 'a loop, on the host for now' }}.

#include "lion/lion_kernel.h"

extern "C" void lion_kernel(float* param, const float* grad, float* exp_avg, int64_t numel, const LionFactors* by) {
    for (int64_t index = 0; index < numel; ++index) lion_element(param[index], grad[index], exp_avg[index], *by);
}
