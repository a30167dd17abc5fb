// The gated activation for tensors in host memory. Formulas: deepspeed/ops/transformer/gated.py.
#pragma once

#include "activation/gated_args.h"
#include "common/rows.h"

namespace ds_cpu {

// Rows that lie one after the other at equal distances: a contiguous tensor, or a part of its last dimension.
struct StridedRows {
    Tensor held;
    int64_t stride;
};

static StridedRows strided_rows(const Tensor& x) {
    const int64_t last = x.dim() - 1;
    bool even = x.stride(last) == 1;
    for (int64_t dim = 0; even && dim + 1 < last; ++dim) even = x.stride(dim) == x.stride(dim + 1) * x.size(dim + 1);
    if (even && last > 0) return {x, x.stride(last - 1)};
    return {as_contiguous(x), x.size(last)};
}

static Tensor gated_activation(Tensor gate, Tensor up, int64_t activation) {
    const char* const op = "gated_activation";
    const Dtype dtype = check_float_on_host({op, "gate"}, gate);
    const Rows rows = check_rows({op, "gate"}, gate);
    check_on_host({op, "up"}, up);
    check_same_dtype({op, "up"}, up, gate, "gate");
    check_same_shape({op, "up"}, up, gate, "gate");
    if (activation < 0 || activation > 2) refuse({op, "activation"}, std::to_string(activation), "0, 1 or 2");
    const StridedRows gates = strided_rows(gate), ups = strided_rows(up);
    const Tensor out = new_tensor(gate, sizes_of(gate));
    const GatedArgs args{.cols = rows.cols,
                         .gate_stride = gates.stride,
                         .up_stride = ups.stride,
                         .gate_form = static_cast<Gate>(activation),
                         .gate = gates.held.data_ptr(),
                         .up = ups.held.data_ptr(),
                         .out = out.data_ptr()};
    const auto loop = DS_CPU_BY_DTYPE(dtype, gated_blocks);
    const int64_t blocks = rows.count * ((rows.cols + kGatedBlock - 1) / kGatedBlock);
    parallel_for(blocks, kGrainElements / kGatedBlock, [&](int64_t begin, int64_t end) { loop(args, begin, end); });
    return out;
}

}  // namespace ds_cpu
