// Softmax over the last dimension of scores that are scaled and masked first, in one read where a row fits registers.
//
//     s = scale * x + mask      y = exp(s - max(s)) / sum(exp(s - max(s)))
//
// fp32 throughout, rounded once. A row whose scores are all -inf is nan, as torch has it.
#pragma once

#include "common/divide.h"
#include "common/tensors.h"

namespace ds {

constexpr int kMaskDims = 4;

struct SoftmaxArgs {
    int64_t rows;
    int64_t cols;
    float scale;
    FloatVector mask;
    int64_t sizes[kMaskDims - 1];    // of x before the last dimension, 1 in front
    int64_t strides[kMaskDims - 1];  // of the mask, in elements; 0 where it repeats
    const void* x;
    void* out;
};

// Where the row of the mask for this row of x begins.
__device__ __forceinline__ int64_t mask_row(const SoftmaxArgs& args, int64_t row) {
    const int64_t before = quotient(row, args.sizes[2]), first = quotient(before, args.sizes[1]);
    return first * args.strides[0] + (before - first * args.sizes[1]) * args.strides[1] +
           (row - before * args.sizes[2]) * args.strides[2];
}

template <typename T, int N>
__device__ __forceinline__ Pack<T, N> row_part(const SoftmaxArgs& args, int64_t row, int64_t begin) {
    return read<N>(static_cast<const T*>(args.x) + row * args.cols + begin);
}

template <typename T, int N>
__device__ __forceinline__ Pack<float, N> score_of(const SoftmaxArgs& args, const Pack<T, N>& x, int64_t mask,
                                                   int64_t begin) {
    Pack<float, N> score = widen(x);
    const Pack<float, N> added = args.mask.get<N>(mask + begin, 0.0f);
#pragma unroll
    for (int i = 0; i < N; ++i) score.at[i] = score.at[i] * args.scale + added.at[i];
    return score;
}

template <int N>
__device__ __forceinline__ float most_of(const Pack<float, N>& pack, float most) {
#pragma unroll
    for (int i = 0; i < N; ++i) most = fmaxf(most, pack.at[i]);
    return most;
}

template <typename T, int N>
__device__ __forceinline__ void write_share(const SoftmaxArgs& args, int64_t row, int64_t begin, Pack<float, N> share,
                                            float inverse) {
#pragma unroll
    for (int i = 0; i < N; ++i) share.at[i] *= inverse;
    write(static_cast<T*>(args.out) + row * args.cols + begin, narrow<T>(share));
}

template <typename T, int N, bool kByWarp>
__global__ void __launch_bounds__(kByWarp ? kThreadsOfRows : kHoldingThreads) softmax_held(SoftmaxArgs args) {
    using Threads = RowThreads<kByWarp>;
    const int64_t row = Threads::row();
    if (row >= args.rows) return;  // all threads of a row
    const int64_t mask = args.mask.data == nullptr ? 0 : mask_row(args, row);
    Pack<T, N> x[kUnitsOfRow];
    Pack<float, N> score[kUnitsOfRow];
    float most = -INFINITY, sum = 0.0f;
    each_held<Threads, N>(args.cols, [&](int i, int64_t begin) { x[i] = row_part<T, N>(args, row, begin); });
    each_held<Threads, N>(args.cols, [&](int i, int64_t begin) {
        score[i] = score_of(args, x[i], mask, begin);
        most = most_of(score[i], most);
    });
    most = Threads::reduce(most, Max{}, -INFINITY);
    each_held<Threads, N>(args.cols, [&](int i, int64_t) {
#pragma unroll
        for (int j = 0; j < N; ++j) score[i].at[j] = expf(score[i].at[j] - most);
        sum += sum_of(score[i], [](float one) { return one; });
    });
    const float inverse = 1.0f / Threads::sum(sum);
    each_held<Threads, N>(args.cols,
                          [&](int i, int64_t begin) { write_share<T, N>(args, row, begin, score[i], inverse); });
}

// A row that no block can hold is read three times, from the second cache.
template <typename T, int N>
__global__ void __launch_bounds__(kStreamThreads) softmax_streamed(SoftmaxArgs args) {
    using Threads = RowThreads<false>;
    const int64_t row = Threads::row(), mask = args.mask.data == nullptr ? 0 : mask_row(args, row);
    const auto scores = [&](int64_t begin) { return score_of(args, row_part<T, N>(args, row, begin), mask, begin); };
    float most = -INFINITY, sum = 0.0f;
    each_of_row<Threads, N>(args.cols, [&](int64_t begin) { most = most_of(scores(begin), most); });
    most = Threads::reduce(most, Max{}, -INFINITY);
    each_of_row<Threads, N>(args.cols, [&](int64_t begin) {
        sum += sum_of(scores(begin), [most](float one) { return expf(one - most); });
    });
    const float inverse = 1.0f / Threads::sum(sum);
    each_of_row<Threads, N>(args.cols, [&](int64_t begin) {
        Pack<float, N> share = scores(begin);
#pragma unroll
        for (int i = 0; i < N; ++i) share.at[i] = expf(share.at[i] - most);
        write_share<T, N>(args, row, begin, share, inverse);
    });
}

template <typename T, int N>
static void run_softmax(const Tensor& x, const SoftmaxArgs& args) {
    const OnDevice device(x);
    const int64_t units = divide_up(args.cols, N);
    const RowPlan plan = plan_of(units);
    const auto kernel = plan == RowPlan::kByWarp    ? softmax_held<T, N, true>
                        : plan == RowPlan::kByBlock ? softmax_held<T, N, false>
                                                    : softmax_streamed<T, N>;
    launch(kernel, grid_of({"masked_softmax", "x"}, blocks_of(plan, args.rows)), threads_of(plan, units),
           device.stream(), args);
}

// `mask` repeats over dimensions of size 1 before the last; its rows are contiguous. Fills sizes, strides and mask.
static Tensor check_mask(const Tensor& mask, const Tensor& x, SoftmaxArgs& args) {
    const Argument argument{"masked_softmax", "mask"};
    check_beside(argument, mask, x, "x");
    args.mask.dtype = check_float(argument, mask);
    bool fits = mask.dim() == x.dim() && mask.size(mask.dim() - 1) == args.cols;
    for (int64_t dim = 0; fits && dim < x.dim() - 1; ++dim) fits = mask.size(dim) == x.size(dim) || mask.size(dim) == 1;
    if (!fits) refuse(argument, shape_name(mask), "as x, " + shape_name(x) + ", or 1 before the last dimension");
    const Tensor held = as_contiguous(mask);
    args.mask.data = held.data_ptr();
    const int64_t front = kMaskDims - x.dim();
    int64_t stride = args.cols;
    for (int64_t dim = x.dim() - 2; dim >= 0; --dim) {
        args.strides[front + dim] = held.size(dim) == 1 ? 0 : stride;
        stride *= held.size(dim);
    }
    return held;
}

static Tensor masked_softmax(Tensor x, std::optional<Tensor> mask, double scale) {
    const Argument argument{"masked_softmax", "x"};
    const Dtype dtype = check_float_on_device(argument, x);
    const Rows rows = check_rows(argument, x);
    if (x.dim() > kMaskDims) refuse(argument, shape_name(x), "of 1 to 4 dimensions");
    const Tensor from = as_contiguous(x), out = new_tensor(x, sizes_of(x));
    SoftmaxArgs args{.rows = rows.count,
                     .cols = rows.cols,
                     .scale = static_cast<float>(scale),
                     .mask = {nullptr, Dtype::kFp32},
                     .sizes = {1, 1, 1},
                     .strides = {0, 0, 0},
                     .x = from.data_ptr(),
                     .out = out.data_ptr()};
    for (int64_t dim = 0; dim < x.dim() - 1; ++dim) args.sizes[kMaskDims - x.dim() + dim] = x.size(dim);
    std::optional<Tensor> held;
    if (mask.has_value()) held = check_mask(*mask, x, args);
    by_dtype(dtype, [&](auto one) {
        using T = decltype(one);
        constexpr int N = kWide<T>;
        const bool wide = is_aligned<N>(data_of<T>(from), rows.cols) && args.mask.is_aligned<N>();
        wide ? run_softmax<T, N>(x, args) : run_softmax<T, 1>(x, args);
    });
    return out;
}

}  // namespace ds
