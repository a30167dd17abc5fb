// The library of a step of generation: linear layers of few rows, with plain and quantized weights, and the gate of a
// feed-forward layer.

#include "activation/gated.h"
#include "linear/linear.h"

STABLE_TORCH_LIBRARY_FRAGMENT(ds_cuda, m) {
    m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
    m.def(
        "packed_linear(Tensor x, Tensor data, Tensor scales, Tensor? zeros, Tensor? bias, int bits, "
        "int input_bits=16) -> Tensor");
    m.def("gated_activation(Tensor gate, Tensor up, int activation) -> Tensor");
}

DS_CUDA_LIBRARY_IMPL(m) {
    m.impl("linear", TORCH_BOX(&ds::linear));
    m.impl("packed_linear", TORCH_BOX(&ds::packed_linear));
    m.impl("gated_activation", TORCH_BOX(&ds::gated_activation));
}
