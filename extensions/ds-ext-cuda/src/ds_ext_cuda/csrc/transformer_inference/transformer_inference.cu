// The library of a transformer's building blocks: each op has its own folder (norm, activation, rotary, softmax); they
// are compiled as one, because reading torch's headers takes longer than compiling some of them.

#include "activation/elementwise.h"
#include "norm/norm.h"
#include "rotary/rotary.h"
#include "softmax/softmax.h"

STABLE_TORCH_LIBRARY_FRAGMENT(ds_cuda, m) {
    m.def("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor");
    m.def(
        "layer_norm_residual(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)");
    m.def("rms_norm(Tensor x, Tensor? weight, float eps) -> Tensor");
    m.def("rms_norm_residual(Tensor x, Tensor residual, Tensor? weight, float eps) -> (Tensor, Tensor)");
    m.def("gelu(Tensor x, bool tanh) -> Tensor");
    m.def("bias_gelu(Tensor x, Tensor bias, bool tanh) -> Tensor");
    m.def("bias_residual_add(Tensor x, Tensor? bias, Tensor residual) -> Tensor");
    m.def("rotary(Tensor x, Tensor cos, Tensor sin, bool interleaved, int seq_dim) -> Tensor");
    m.def("masked_softmax(Tensor x, Tensor? mask, float scale) -> Tensor");
}

DS_CUDA_LIBRARY_IMPL(m) {
    m.impl("layer_norm", TORCH_BOX(&ds::layer_norm));
    m.impl("layer_norm_residual", TORCH_BOX(&ds::layer_norm_residual));
    m.impl("rms_norm", TORCH_BOX(&ds::rms_norm));
    m.impl("rms_norm_residual", TORCH_BOX(&ds::rms_norm_residual));
    m.impl("gelu", TORCH_BOX(&ds::gelu));
    m.impl("bias_gelu", TORCH_BOX(&ds::bias_gelu));
    m.impl("bias_residual_add", TORCH_BOX(&ds::bias_residual_add));
    m.impl("rotary", TORCH_BOX(&ds::rotary));
    m.impl("masked_softmax", TORCH_BOX(&ds::masked_softmax));
}
