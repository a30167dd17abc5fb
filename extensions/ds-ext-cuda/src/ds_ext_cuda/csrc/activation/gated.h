// The gate of a gated feed-forward layer: activation(gate) * up. Formulas: deepspeed/ops/transformer/gated.py.
#pragma once

#include "activation/elementwise.h"

namespace ds {

enum class Gate : int32_t { kSilu, kGelu, kGeluTanh };

struct GatedArgs {
    int64_t items;  // of N elements each
    int64_t items_per_row;
    int64_t gate_stride;  // elements from one row to the next
    int64_t up_stride;
    Gate form;
    const void* gate;
    const void* up;
    void* out;
};

__device__ __forceinline__ float activated(float x, Gate form) {
    if (form == Gate::kSilu) return x / (1.0f + expf(-x));
    return form == Gate::kGelu ? gelu_of(x) : gelu_tanh_of(x);
}

template <typename T, int N>
__global__ void __launch_bounds__(kElementThreads) gated_kernel(GatedArgs args) {
    const int64_t item = static_cast<int64_t>(blockIdx.x) * kElementThreads + threadIdx.x;
    if (item >= args.items) return;
    const int64_t row = quotient(item, args.items_per_row), at = (item - row * args.items_per_row) * N;
    const auto gate = read<N>(static_cast<const T*>(args.gate) + row * args.gate_stride + at);
    const auto up = read<N>(static_cast<const T*>(args.up) + row * args.up_stride + at);
    Pack<float, N> product = widen(gate);
    const Pack<float, N> factor = widen(up);
#pragma unroll
    for (int i = 0; i < N; ++i) product.at[i] = activated(product.at[i], args.form) * factor.at[i];
    write(static_cast<T*>(args.out) + item * N, narrow<T>(product));
}

template <typename T, int N>
static void run_gated(const Tensor& gate, GatedArgs args, const Rows& rows) {
    const OnDevice device(gate);
    args.items_per_row = rows.cols / N;
    args.items = rows.count * args.items_per_row;
    launch(gated_kernel<T, N>, grid_of({"gated_activation", "gate"}, divide_up(args.items, kElementThreads)),
           kElementThreads, device.stream(), args);
}

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
    const Dtype dtype = check_float_on_device({op, "gate"}, gate);
    const Rows rows = check_rows({op, "gate"}, gate);
    check_beside({op, "up"}, up, gate, "gate");
    check_same_dtype({op, "up"}, up, gate, "gate");
    check_same_shape({op, "up"}, up, gate, "gate");
    if (activation < 0 || activation > 2) refuse({op, "activation"}, std::to_string(activation), "0, 1 or 2");
    const StridedRows gates = strided_rows(gate), ups = strided_rows(up);
    const Tensor out = new_tensor(gate, sizes_of(gate));
    const GatedArgs args{.gate_stride = gates.stride,
                         .up_stride = ups.stride,
                         .form = static_cast<Gate>(activation),
                         .gate = gates.held.data_ptr(),
                         .up = ups.held.data_ptr(),
                         .out = out.data_ptr()};
    by_dtype(dtype, [&](auto one) {
        using T = decltype(one);
        constexpr int N = kWide<T>;
        const bool wide = is_aligned<N>(data_of<T>(gates.held), gates.stride) &&
                          is_aligned<N>(data_of<T>(ups.held), ups.stride) && rows.cols % N == 0;
        wide ? run_gated<T, N>(gate, args, rows) : run_gated<T, 1>(gate, args, rows);
    });
    return out;
}

}  // namespace ds
