// The rotary embedding for tensors on the device. Formulas: deepspeed/ops/transformer/rotary.py.
#pragma once

#include "common/tensors.h"
#include "rotary/rotary_kernel.h"

namespace ds_xpu {

// fp32 (S, R/2) or (B, S, R/2), contiguous.
static Tensor check_rotary_table(const char* name, const Tensor& table, const Tensor& x, int64_t seq_dim) {
    const Argument argument{"rotary", name};
    check_beside(argument, table, x, "x");
    check_fp32(argument, table);
    const int64_t dims = table.dim();
    bool fits =
        (dims == 2 || dims == 3) && table.size(dims - 2) == x.size(seq_dim) && 2 * table.size(dims - 1) <= x.size(3);
    if (dims == 3) fits = fits && table.size(0) == x.size(0);
    if (!fits) {
        refuse(argument, shape_name(table),
               "(S, R/2) or (B, S, R/2), with x of " + shape_name(x) + " and seq_dim " + std::to_string(seq_dim));
    }
    return as_contiguous(table);
}

static Tensor rotary(Tensor x, Tensor cos, Tensor sin, bool interleaved, int64_t seq_dim) {
    check_on_device({"rotary", "x"}, x);
    check_float({"rotary", "x"}, x);
    if (x.dim() != 4) refuse({"rotary", "x"}, shape_name(x), "of 4 dimensions");
    if (seq_dim != 1 && seq_dim != 2) refuse({"rotary", "seq_dim"}, std::to_string(seq_dim), "1 or 2");
    const Tensor cosines = check_rotary_table("cos", cos, x, seq_dim),
                 sines = check_rotary_table("sin", sin, x, seq_dim);
    check_same_shape({"rotary", "sin"}, sin, cos, "cos");
    const Tensor from = as_contiguous(x), out = new_tensor(x, sizes_of(x));
    const int64_t head_dim = x.size(3), half = cos.size(cos.dim() - 1), row_items = head_dim - half;
    const RotaryArgs args{.num_items = head_dim == 0 ? 0 : x.numel() / head_dim * row_items,
                          .row_items = row_items,
                          .head_dim = head_dim,
                          .half = half,
                          .length = x.size(seq_dim),
                          .rows_per_position = seq_dim == 1 ? x.size(2) : 1,
                          .rows_per_batch = x.size(1) * x.size(2),
                          .table_per_batch = cos.dim() == 3,
                          .interleaved = interleaved,
                          .cos = static_cast<const float*>(data_of(cosines)),
                          .sin = static_cast<const float*>(data_of(sines)),
                          .x = array_of({"rotary", "x"}, from),
                          .out = array_of({"rotary", "out"}, out)};
    if (args.num_items > 0) {
        DS_XPU_LAUNCH(current_queue(device_index_of(x)), rotary_kernel, groups_for(args.num_items), kGroupSize, args);
    }
    return out;
}

}  // namespace ds_xpu
