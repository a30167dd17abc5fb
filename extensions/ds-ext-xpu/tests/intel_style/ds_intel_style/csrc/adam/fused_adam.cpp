// Built by the vendor's own means.
#include "step.h"

STABLE_TORCH_LIBRARY_FRAGMENT(ds_intel_style, m) { m.def("step_(Tensor(a!) param, Tensor grad, float lr) -> ()"); }

STABLE_TORCH_LIBRARY_IMPL(ds_intel_style, CompositeExplicitAutograd, m) { m.impl("step_", TORCH_BOX(&step)); }
