// A small operator of the vendor's own, through torch's stable ABI.
#include <torch/csrc/stable/library.h>

#include "scale.h"

using torch::stable::Tensor;

static void step(Tensor param, Tensor grad, double lr) {
    float* params = static_cast<float*>(param.data_ptr());
    const float* grads = static_cast<const float*>(grad.data_ptr());
    for (int64_t i = 0; i < param.numel(); ++i) params[i] = moved(params[i], grads[i], lr);
}

STABLE_TORCH_LIBRARY_FRAGMENT(ds_intel_style_host, m) { m.def("step_(Tensor(a!) param, Tensor grad, float lr) -> ()"); }

STABLE_TORCH_LIBRARY_IMPL(ds_intel_style_host, CompositeExplicitAutograd, m) { m.impl("step_", TORCH_BOX(&step)); }
