// The library of a transformer's building blocks: each op has its own folder (norm, activation, rotary); they are
// compiled as one, because reading SYCL's and torch's headers takes longer than compiling all of them.

#include "activation/gelu.h"
#include "norm/norm.h"
#include "rotary/rotary.h"

STABLE_TORCH_LIBRARY_FRAGMENT(ds_xpu, m) {
    m.def("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor");
    m.def(
        "layer_norm_residual(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)");
    m.def("rms_norm(Tensor x, Tensor? weight, float eps) -> Tensor");
    m.def("rms_norm_residual(Tensor x, Tensor residual, Tensor? weight, float eps) -> (Tensor, Tensor)");
    m.def("gelu(Tensor x, bool tanh) -> Tensor");
    m.def("bias_gelu(Tensor x, Tensor bias, bool tanh) -> Tensor");
    m.def("rotary(Tensor x, Tensor cos, Tensor sin, bool interleaved, int seq_dim) -> Tensor");
}

// Of every device, so that a tensor of another one is refused by name.
STABLE_TORCH_LIBRARY_IMPL(ds_xpu, CompositeExplicitAutograd, m) {
    m.impl("layer_norm", TORCH_BOX(&ds_xpu::layer_norm));
    m.impl("layer_norm_residual", TORCH_BOX(&ds_xpu::layer_norm_residual));
    m.impl("rms_norm", TORCH_BOX(&ds_xpu::rms_norm));
    m.impl("rms_norm_residual", TORCH_BOX(&ds_xpu::rms_norm_residual));
    m.impl("gelu", TORCH_BOX(&ds_xpu::gelu));
    m.impl("bias_gelu", TORCH_BOX(&ds_xpu::bias_gelu));
    m.impl("rotary", TORCH_BOX(&ds_xpu::rotary));
}
