// Layer norm and RMS norm, each with a form that adds a residual first. Formulas: deepspeed/ops/transformer/norm.py.
#pragma once

#include <tuple>
#include <type_traits>

#include "common/tensors.h"

namespace ds {

struct NormArgs {
    int64_t rows;
    int64_t cols;
    bool centered;  // layer norm: the mean is subtracted
    float eps;
    FloatVector weight;
    FloatVector bias;
    const void* x;
    const void* residual;  // null: none
    void* sum;             // x + residual, where there is one
    void* out;
};

// x + residual, rounded to T as two steps would, and kept: it is the input of the next residual addition.
template <typename T, int N>
__device__ __forceinline__ Pack<T, N> write_sum(const NormArgs& args, const Pack<T, N>& x, const Pack<T, N>& residual,
                                                int64_t at) {
    Pack<float, N> sum = widen(x);
    const Pack<float, N> other = widen(residual);
#pragma unroll
    for (int i = 0; i < N; ++i) sum.at[i] += other.at[i];
    const Pack<T, N> rounded = narrow<T>(sum);
    write(static_cast<T*>(args.sum) + at, rounded);
    return rounded;
}

template <typename T, int N>
__device__ __forceinline__ void write_normed(const NormArgs& args, const Pack<float, N>& x, float mean, float scale,
                                             int64_t row, int64_t begin) {
    const Pack<float, N> weight = args.weight.get<N>(begin, 1.0f), bias = args.bias.get<N>(begin, 0.0f);
    Pack<float, N> normed;
#pragma unroll
    for (int i = 0; i < N; ++i) normed.at[i] = __fmaf_rn((x.at[i] - mean) * scale, weight.at[i], bias.at[i]);
    write(static_cast<T*>(args.out) + row * args.cols + begin, narrow<T>(normed));
}

// A vector of T itself is read as it is stored, early, and for all parts of a row at once.
template <typename T>
__device__ __forceinline__ bool is_of(const FloatVector& vector) {
    constexpr Dtype kDtype = std::is_same_v<T, float>  ? Dtype::kFp32
                             : std::is_same_v<T, Bf16> ? Dtype::kBf16
                                                       : Dtype::kFp16;
    return vector.data != nullptr && vector.dtype == kDtype;
}

template <typename T, int N, typename Threads>
__device__ __forceinline__ void load_vector(const NormArgs& args, const FloatVector& vector,
                                            Words<T, N> (&found)[kUnitsOfRow]) {
    each_held<Threads, N>(args.cols, [&](int i, int64_t begin) {
        found[i] = as_bits<Words<T, N>>(read<N>(static_cast<const T*>(vector.data) + begin));
    });
}

__device__ __forceinline__ float scale_of(const NormArgs& args, float squares) {
    return rsqrtf(squares / static_cast<float>(args.cols) + args.eps);
}

// The part of a row that this thread keeps, with the residual added.
template <typename T, int N, typename Threads>
__device__ __forceinline__ void load_row(const NormArgs& args, int64_t row, Words<T, N> (&x)[kUnitsOfRow]) {
    using Held = Words<T, N>;
    const int64_t start = row * args.cols;
    const T* from = static_cast<const T*>(args.x) + start;
    const T* beside = static_cast<const T*>(args.residual) + start;
    each_held<Threads, N>(args.cols, [&](int i, int64_t begin) { x[i] = as_bits<Held>(read<N>(from + begin)); });
    if (args.residual == nullptr) return;
    Held residual[kUnitsOfRow];
    each_held<Threads, N>(args.cols,
                          [&](int i, int64_t begin) { residual[i] = as_bits<Held>(read<N>(beside + begin)); });
    each_held<Threads, N>(args.cols, [&](int i, int64_t begin) {
        x[i] = as_bits<Held>(
            write_sum<T, N>(args, as_bits<Pack<T, N>>(x[i]), as_bits<Pack<T, N>>(residual[i]), start + begin));
    });
}

struct Moments {
    float mean;     // 0 where it is not subtracted
    float squares;  // of what differs from it, summed
};

template <typename T, int N, typename Threads>
__device__ __forceinline__ float sum_held(const NormArgs& args, const Words<T, N> (&x)[kUnitsOfRow]) {
    float sum = 0.0f;
    each_held<Threads, N>(args.cols, [&](int i, int64_t) {
        sum += sum_of(widen(as_bits<Pack<T, N>>(x[i])), [](float one) { return one; });
    });
    return warp_reduce(sum, Sum{});
}

template <typename T, int N, typename Threads>
__device__ __forceinline__ float squares_held(const NormArgs& args, const Words<T, N> (&x)[kUnitsOfRow], float mean) {
    float squares = 0.0f;
    each_held<Threads, N>(args.cols, [&](int i, int64_t) {
        const Pack<float, N> wide = widen(as_bits<Pack<T, N>>(x[i]));
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const float apart = wide.at[j] - mean;
            squares = __fmaf_rn(apart, apart, squares);
        }
    });
    return warp_reduce(squares, Sum{});
}

// Of a row to a warp. The mean is subtracted before squaring, so that a row far from zero keeps its variance.
template <typename T, int N>
__device__ __forceinline__ Moments moments_of_warp(const NormArgs& args, const Words<T, N> (&x)[kUnitsOfRow]) {
    using Threads = RowThreads<true>;
    const float mean = args.centered ? sum_held<T, N, Threads>(args, x) / static_cast<float>(args.cols) : 0.0f;
    return {mean, squares_held<T, N, Threads>(args, x, mean)};
}

struct PartMoments {
    float count;
    float sum;
    float mean;
    float squares;
};

// Of a row to a block. Each warp subtracts its own mean; behind one barrier these are joined.
template <typename T, int N>
__device__ __forceinline__ Moments moments_of_block(const NormArgs& args, const Words<T, N> (&x)[kUnitsOfRow]) {
    using Threads = RowThreads<false>;
    __shared__ PartMoments of_warps[kHoldingThreads / kWarpSize];
    const int warp = threadIdx.x / kWarpSize, threads = blockDim.x, cols = static_cast<int>(args.cols);
    int count = 0;
#pragma unroll
    for (int i = 0; i < kUnitsOfRow; ++i) {
        count += min(max(cols - (i * threads + warp * kWarpSize) * N, 0), kWarpSize * N);
    }
    PartMoments own = {static_cast<float>(count), 0.0f, 0.0f, 0.0f};
    if (args.centered) {
        own.sum = sum_held<T, N, Threads>(args, x);
        own.mean = own.sum * fast_reciprocal(own.count);
    }
    own.squares = squares_held<T, N, Threads>(args, x, own.mean);
    if (threadIdx.x % kWarpSize == 0) of_warps[warp] = own;
    __syncthreads();
    Moments found = {0.0f, 0.0f};
    const int num_warps = threads / kWarpSize;
#pragma unroll 1
    for (int i = 0; i < num_warps; ++i) found.mean += of_warps[i].sum;
    found.mean /= static_cast<float>(cols);
#pragma unroll 1
    for (int i = 0; i < num_warps; ++i) {
        const float apart = of_warps[i].mean - found.mean;
        found.squares += __fmaf_rn(apart * of_warps[i].count, apart, of_warps[i].squares);
    }
    return found;
}

template <typename T, int N, bool kByWarp>
__global__ void __launch_bounds__(kByWarp ? kThreadsOfRows : kHoldingThreads) norm_held(NormArgs args) {
    using Threads = RowThreads<kByWarp>;
    const int64_t row = Threads::row();
    if (row >= args.rows) return;  // all threads of a row
    Words<T, N> x[kUnitsOfRow];
    load_row<T, N, Threads>(args, row, x);
    const bool early = is_of<T>(args.weight) && (args.bias.data == nullptr || is_of<T>(args.bias));
    Words<T, N> weight[kUnitsOfRow], bias[kUnitsOfRow];
    if (early) load_vector<T, N, Threads>(args, args.weight, weight);
    if (early && args.bias.data != nullptr) load_vector<T, N, Threads>(args, args.bias, bias);
    Moments moments;
    if constexpr (kByWarp) {
        moments = moments_of_warp<T, N>(args, x);
    } else {
        moments = moments_of_block<T, N>(args, x);
    }
    const float scale = scale_of(args, moments.squares);
    T* const to = static_cast<T*>(args.out) + row * args.cols;
    if (!early) {
        each_held<Threads, N>(args.cols, [&](int i, int64_t begin) {
            write_normed<T>(args, widen(as_bits<Pack<T, N>>(x[i])), moments.mean, scale, row, begin);
        });
    } else if (args.bias.data != nullptr) {
        each_held<Threads, N>(args.cols, [&](int i, int64_t begin) {
            Pack<float, N> normed = widen(as_bits<Pack<T, N>>(x[i]));
            const Pack<float, N> factor = widen(as_bits<Pack<T, N>>(weight[i])),
                                 added = widen(as_bits<Pack<T, N>>(bias[i]));
#pragma unroll
            for (int j = 0; j < N; ++j) {
                normed.at[j] = __fmaf_rn((normed.at[j] - moments.mean) * scale, factor.at[j], added.at[j]);
            }
            write(to + begin, narrow<T>(normed));
        });
    } else {
        each_held<Threads, N>(args.cols, [&](int i, int64_t begin) {
            Pack<float, N> normed = widen(as_bits<Pack<T, N>>(x[i]));
            const Pack<float, N> factor = widen(as_bits<Pack<T, N>>(weight[i]));
#pragma unroll
            for (int j = 0; j < N; ++j) normed.at[j] = (normed.at[j] - moments.mean) * scale * factor.at[j];
            write(to + begin, narrow<T>(normed));
        });
    }
}

// N elements of x with the residual added, for a row that no block can hold.
template <typename T, int N>
__device__ __forceinline__ Pack<float, N> norm_input(const NormArgs& args, int64_t at) {
    const Pack<T, N> x = read<N>(static_cast<const T*>(args.x) + at);
    if (args.residual == nullptr) return widen(x);
    return widen(write_sum<T, N>(args, x, read<N>(static_cast<const T*>(args.residual) + at), at));
}

// Such a row is read again, from the second cache: two or three times.
template <typename T, int N>
__global__ void __launch_bounds__(kStreamThreads) norm_streamed(NormArgs args) {
    using Threads = RowThreads<false>;
    const int64_t row = Threads::row();
    const T* source = static_cast<const T*>(args.residual == nullptr ? args.x : args.sum) + row * args.cols;
    float mean = 0.0f, squares = 0.0f;
    if (args.centered || args.residual != nullptr) {
        each_of_row<Threads, N>(args.cols, [&](int64_t begin) {
            mean += sum_of(norm_input<T, N>(args, row * args.cols + begin), [](float one) { return one; });
        });
        mean = args.centered ? Threads::sum(mean) / static_cast<float>(args.cols) : 0.0f;
    }
    each_of_row<Threads, N>(args.cols, [&](int64_t begin) {  // of `sum`, each thread reads what it has written
        squares += sum_of(widen(read<N>(source + begin)), [mean](float one) { return (one - mean) * (one - mean); });
    });
    const float scale = scale_of(args, Threads::sum(squares));
    each_of_row<Threads, N>(args.cols, [&](int64_t begin) {
        write_normed<T>(args, widen(read<N>(source + begin)), mean, scale, row, begin);
    });
}

template <typename T, int N>
static void run_norm(const char* op, const Tensor& x, const NormArgs& args) {
    const OnDevice device(x);
    const int64_t units = divide_up(args.cols, N);
    const RowPlan plan = plan_of(units);
    const auto kernel = plan == RowPlan::kByWarp    ? norm_held<T, N, true>
                        : plan == RowPlan::kByBlock ? norm_held<T, N, false>
                                                    : norm_streamed<T, N>;
    launch(kernel, grid_of({op, "x"}, blocks_of(plan, args.rows)), threads_of(plan, units), device.stream(), args);
}

struct NormResult {
    Tensor out;
    Tensor sum;
};

static NormResult norm(const char* op, const Tensor& x, const Tensor* residual, const std::optional<Tensor>& weight,
                       const std::optional<Tensor>& bias, double eps, bool centered) {
    const Dtype dtype = check_float_on_device({op, "x"}, x);
    const Rows rows = check_rows({op, "x"}, x);
    if (residual != nullptr) {
        check_beside({op, "residual"}, *residual, x, "x");
        check_same_dtype({op, "residual"}, *residual, x, "x");
        check_same_shape({op, "residual"}, *residual, x, "x");
    }
    const HeldVector weights = check_vector({op, "weight"}, weight, rows.cols, x);
    const HeldVector biases = check_vector({op, "bias"}, bias, rows.cols, x);
    const Tensor from = as_contiguous(x), beside = residual != nullptr ? as_contiguous(*residual) : from;
    const NormResult result{new_tensor(x, sizes_of(x)), residual != nullptr ? new_tensor(x, sizes_of(x)) : x};
    const NormArgs args{.rows = rows.count,
                        .cols = rows.cols,
                        .centered = centered,
                        .eps = static_cast<float>(eps),
                        .weight = weights.vector,
                        .bias = biases.vector,
                        .x = from.data_ptr(),
                        .residual = residual != nullptr ? beside.data_ptr() : nullptr,
                        .sum = result.sum.data_ptr(),
                        .out = result.out.data_ptr()};
    by_dtype(dtype, [&](auto one) {
        using T = decltype(one);
        constexpr int N = kWide<T>;
        const bool wide = is_aligned<N>(data_of<T>(from), rows.cols) && is_aligned<N>(data_of<T>(beside), rows.cols) &&
                          args.weight.is_aligned<N>() && args.bias.is_aligned<N>();
        wide ? run_norm<T, N>(op, x, args) : run_norm<T, 1>(op, x, args);
    });
    return result;
}

static Tensor layer_norm(Tensor x, std::optional<Tensor> weight, std::optional<Tensor> bias, double eps) {
    return norm("layer_norm", x, nullptr, weight, bias, eps, /*centered=*/true).out;
}

static std::tuple<Tensor, Tensor> layer_norm_residual(Tensor x, Tensor residual, std::optional<Tensor> weight,
                                                      std::optional<Tensor> bias, double eps) {
    const NormResult result = norm("layer_norm_residual", x, &residual, weight, bias, eps, /*centered=*/true);
    return {result.out, result.sum};
}

static Tensor rms_norm(Tensor x, std::optional<Tensor> weight, double eps) {
    return norm("rms_norm", x, nullptr, weight, std::nullopt, eps, /*centered=*/false).out;
}

static std::tuple<Tensor, Tensor> rms_norm_residual(Tensor x, Tensor residual, std::optional<Tensor> weight,
                                                    double eps) {
    const NormResult result = norm("rms_norm_residual", x, &residual, weight, std::nullopt, eps, /*centered=*/false);
    return {result.out, result.sum};
}

}  // namespace ds
