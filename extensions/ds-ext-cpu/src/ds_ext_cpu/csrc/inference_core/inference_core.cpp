// The library of a step of generation: linear layers of few rows, with plain and quantized weights, and the gate of a
// feed-forward layer.

#include "activation/gated_args.h"
#include "common/half.h"
#include "common/isa.h"
#include "common/rows.h"
#include "linear/linear_args.h"

#define DS_CPU_LOOPS "inference_core/inference_core_loops.h"
#include "common/each_isa.h"

// These choose among the passes above.
#include "activation/gated.h"
#include "linear/linear.h"

STABLE_TORCH_LIBRARY_FRAGMENT(ds_cpu, m) {
    m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
    m.def("packed_linear(Tensor x, Tensor data, Tensor scales, Tensor? zeros, Tensor? bias, int bits) -> Tensor");
    m.def("gated_activation(Tensor gate, Tensor up, int activation) -> Tensor");
}

// Of every device, so that a tensor of another one is refused by name.
STABLE_TORCH_LIBRARY_IMPL(ds_cpu, CompositeExplicitAutograd, m) {
    m.impl("linear", TORCH_BOX(&ds_cpu::linear));
    m.impl("packed_linear", TORCH_BOX(&ds_cpu::packed_linear));
    m.impl("gated_activation", TORCH_BOX(&ds_cpu::gated_activation));
}
