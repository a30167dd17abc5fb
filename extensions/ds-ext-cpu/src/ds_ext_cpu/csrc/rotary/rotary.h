// The rotary embedding for tensors in host memory. Formulas: deepspeed/ops/transformer/rotary.py.
#pragma once

#include "common/rows.h"
#include "rotary/rotary_args.h"

namespace ds_cpu {

// (S, R/2) or (B, S, R/2) of fp32, on the host, R at most the last dimension of x.
static Tensor check_rotary_table(const char* name, const Tensor& table, const Tensor& x, int64_t seq_dim) {
    const Argument argument{"rotary", name};
    check_on_host(argument, table);
    check_fp32(argument, table);
    const int64_t dims = table.dim();
    bool fits = dims == 2 || (dims == 3 && table.size(0) == x.size(0));
    fits = fits && table.size(dims - 2) == x.size(seq_dim) && 2 * table.size(dims - 1) <= x.size(3);
    if (!fits) {
        refuse(argument, shape_name(table),
               "(S, R/2) or (B, S, R/2), with x of " + shape_name(x) + " and seq_dim " + std::to_string(seq_dim));
    }
    return as_contiguous(table);
}

static Tensor rotary(Tensor x, Tensor cos, Tensor sin, bool interleaved, int64_t seq_dim) {
    const Dtype dtype = check_float_on_host({"rotary", "x"}, x);
    if (x.dim() != 4) refuse({"rotary", "x"}, shape_name(x), "of 4 dimensions");
    if (seq_dim != 1 && seq_dim != 2) refuse({"rotary", "seq_dim"}, std::to_string(seq_dim), "1 or 2");
    const Tensor cosines = check_rotary_table("cos", cos, x, seq_dim),
                 sines = check_rotary_table("sin", sin, x, seq_dim);
    check_same_shape({"rotary", "sin"}, sin, cos, "cos");
    const Tensor from = as_contiguous(x), out = new_tensor(x, sizes_of(x));
    const RotaryArgs args{.head_dim = x.size(3),
                          .half = cos.size(cos.dim() - 1),
                          .length = x.size(seq_dim),
                          .rows_per_position = seq_dim == 1 ? x.size(2) : 1,
                          .rows_per_batch = x.size(1) * x.size(2),
                          .table_per_batch = cos.dim() == 3,
                          .interleaved = interleaved,
                          .x = from.data_ptr(),
                          .cos = static_cast<const float*>(cosines.data_ptr()),
                          .sin = static_cast<const float*>(sines.data_ptr()),
                          .out = out.data_ptr()};
    const auto loop = DS_CPU_BY_DTYPE(dtype, rotary_rows);
    const int64_t rows = args.head_dim == 0 ? 0 : x.numel() / args.head_dim;
    parallel_for(rows, grain_of_rows(args.head_dim), [&](int64_t begin, int64_t end) { loop(args, begin, end); });
    return out;
}

}  // namespace ds_cpu
