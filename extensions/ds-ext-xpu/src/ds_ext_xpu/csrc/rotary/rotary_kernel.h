// The rotary embedding, a pair by a work-item. Formulas: deepspeed/ops/transformer/rotary.py.
#pragma once

#include "common/kernel.h"
#include "rotary/rotary_args.h"

namespace ds_xpu {

DS_XPU_KERNEL void rotary_kernel(RotaryArgs args) {
    const int64_t at = static_cast<int64_t>(this_item().get_global_id(0));
    if (at >= args.num_items) return;
    const int64_t row = divide(at, args.row_items), i = at - row * args.row_items;
    const int64_t start = row * args.head_dim;
    if (i >= args.half) {  // beyond what turns
        const int64_t here = start + args.half + i;
        store(args.out, here, load(args.x, here));
        return;
    }
    const int64_t index = divide(row, args.rows_per_position), turns = divide(index, args.length);
    const int64_t position = index - turns * args.length;
    const int64_t batch = args.table_per_batch ? divide(row, args.rows_per_batch) : 0;
    const int64_t angle = (batch * args.length + position) * args.half + i;
    const int64_t first = start + (args.interleaved ? 2 * i : i);
    const int64_t second = first + (args.interleaved ? 1 : args.half);
    const float a = load(args.x, first), b = load(args.x, second), cos = args.cos[angle], sin = args.sin[angle];
    store(args.out, first, a * cos - b * sin);
    store(args.out, second, b * cos + a * sin);
}

}  // namespace ds_xpu
