// The rotary embedding; the same bits as the torch reference: products and sums are each rounded.
// Formulas: deepspeed/ops/transformer/rotary.py.
#pragma once

#include "common/divide.h"
#include "common/tensors.h"

namespace ds {

constexpr int kRotaryThreads = 256;

struct RotaryArgs {
    int64_t items;     // of all heads: what one thread does
    int64_t per_head;  // items of one head
    int64_t turned;    // of those, the first that turn; the others copy
    int64_t head_dim;
    int64_t half;               // pairs that turn
    int64_t length;             // positions
    int64_t rows_per_position;  // consecutive heads of one position
    int64_t rows_per_batch;
    bool table_per_batch;
    const void* x;
    const float* cos;  // (length, half), or (batch, length, half)
    const float* sin;
    void* out;
};

__device__ __forceinline__ void turn(float& a, float& b, float cos, float sin) {
    const float turned = __fsub_rn(__fmul_rn(a, cos), __fmul_rn(b, sin));
    b = __fadd_rn(__fmul_rn(b, cos), __fmul_rn(a, sin));
    a = turned;
}

// N pairs whose members lie `half` apart.
template <typename T, int N>
__device__ __forceinline__ void turn_halves(const T* x, const float* cos, const float* sin, int64_t half, T* out) {
    Pack<float, N> a = widen(read<N>(x)), b = widen(read<N>(x + half));
    const Pack<float, N> c = read<N>(cos), s = read<N>(sin);
#pragma unroll
    for (int i = 0; i < N; ++i) turn(a.at[i], b.at[i], c.at[i], s.at[i]);
    write(out, narrow<T>(a));
    write(out + half, narrow<T>(b));
}

// N / 2 pairs whose members are neighbours; N = 1 means one pair, read one by one.
template <typename T, int N>
__device__ __forceinline__ void turn_neighbours(const T* x, const float* cos, const float* sin, T* out) {
    if constexpr (N == 1) {
        float a = widen(x[0]), b = widen(x[1]);
        turn(a, b, *cos, *sin);
        out[0] = narrow<T>(a);
        out[1] = narrow<T>(b);
    } else {
        Pack<float, N> pairs = widen(read<N>(x));
        const Pack<float, N / 2> c = read<N / 2>(cos), s = read<N / 2>(sin);
#pragma unroll
        for (int i = 0; i < N; i += 2) turn(pairs.at[i], pairs.at[i + 1], c.at[i / 2], s.at[i / 2]);
        write(out, narrow<T>(pairs));
    }
}

template <typename T, int N, bool kInterleaved>
__global__ void __launch_bounds__(kRotaryThreads) rotary_kernel(RotaryArgs args) {
    const int64_t number = static_cast<int64_t>(blockIdx.x) * kRotaryThreads + threadIdx.x;
    if (number >= args.items) return;
    const int64_t row = quotient(number, args.per_head), item = number - row * args.per_head;
    const T* x = static_cast<const T*>(args.x) + row * args.head_dim;
    T* out = static_cast<T*>(args.out) + row * args.head_dim;
    if (item >= args.turned) {
        const int64_t at = 2 * args.half + (item - args.turned) * N;
        write(out + at, read<N>(x + at));
        return;
    }
    const int64_t position = remainder(quotient(row, args.rows_per_position), args.length);
    const int64_t batch = args.table_per_batch ? quotient(row, args.rows_per_batch) : 0;
    const int64_t angle = (batch * args.length + position) * args.half;
    if constexpr (kInterleaved) {
        const int64_t pair = item * (N == 1 ? 1 : N / 2);
        turn_neighbours<T, N>(x + 2 * pair, args.cos + angle + pair, args.sin + angle + pair, out + 2 * pair);
    } else {
        const int64_t at = item * N;
        turn_halves<T, N>(x + at, args.cos + angle + at, args.sin + angle + at, args.half, out + at);
    }
}

template <typename T, int N, bool kInterleaved>
static void run_rotary(const Tensor& x, RotaryArgs args) {
    const OnDevice device(x);
    const int64_t pairs_of_item = kInterleaved && N > 1 ? N / 2 : N;
    args.turned = args.half / pairs_of_item;
    args.per_head = args.turned + (args.head_dim - 2 * args.half) / N;
    args.items = args.head_dim == 0 ? 0 : x.numel() / args.head_dim * args.per_head;
    launch(rotary_kernel<T, N, kInterleaved>, grid_of({"rotary", "x"}, divide_up(args.items, kRotaryThreads)),
           kRotaryThreads, device.stream(), args);
}

// (S, R/2) or (B, S, R/2) of fp32, beside x, R at most the last dimension of x.
static Tensor check_rotary_table(const char* name, const Tensor& table, const Tensor& x, int64_t seq_dim) {
    const Argument argument{"rotary", name};
    check_beside(argument, table, x, "x");
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
    const Dtype dtype = check_float_on_device({"rotary", "x"}, x);
    if (x.dim() != 4) refuse({"rotary", "x"}, shape_name(x), "of 4 dimensions");
    if (seq_dim != 1 && seq_dim != 2) refuse({"rotary", "seq_dim"}, std::to_string(seq_dim), "1 or 2");
    const Tensor cosines = check_rotary_table("cos", cos, x, seq_dim);
    const Tensor sines = check_rotary_table("sin", sin, x, seq_dim);
    check_same_shape({"rotary", "sin"}, sin, cos, "cos");
    const Tensor from = as_contiguous(x), out = new_tensor(x, sizes_of(x));
    const RotaryArgs args{.head_dim = x.size(3),
                          .half = cos.size(cos.dim() - 1),
                          .length = x.size(seq_dim),
                          .rows_per_position = seq_dim == 1 ? x.size(2) : 1,
                          .rows_per_batch = x.size(1) * x.size(2),
                          .table_per_batch = cos.dim() == 3,
                          .x = from.data_ptr(),
                          .cos = data_of<float>(cosines),
                          .sin = data_of<float>(sines),
                          .out = out.data_ptr()};
    by_dtype(dtype, [&](auto one) {
        using T = decltype(one);
        constexpr int N = kWide<T>;
        const int64_t pairs_of_item = interleaved ? N / 2 : N;
        const bool wide = is_aligned<N>(data_of<T>(from), args.head_dim) && args.half % pairs_of_item == 0 &&
                          is_aligned<N>(args.cos, 0) && is_aligned<N>(args.sin, 0) &&
                          (interleaved || args.half % N == 0);
        if (interleaved) {
            wide ? run_rotary<T, N, true>(x, args) : run_rotary<T, 1, true>(x, args);
        } else {
            wide ? run_rotary<T, N, false>(x, args) : run_rotary<T, 1, false>(x, args);
        }
    });
    return out;
}

}  // namespace ds
