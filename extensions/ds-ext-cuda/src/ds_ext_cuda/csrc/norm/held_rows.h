// Norms of rows that registers hold: a row to a warp or to a block. Device code.
#pragma once

#include <type_traits>

#include "common/tensors.h"

namespace ds {

// A long row that one warp takes: accesses of a lane, and how many such warps share a multiprocessor.
constexpr int kUnitsOfLongRow = 16;
constexpr int kThreadsOfLongRows = 128;
constexpr int kBlocksOfLongRows = 4;

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

template <typename T>
__host__ __device__ __forceinline__ bool is_of(const FloatVector& vector) {
    constexpr Dtype kDtype = std::is_same_v<T, float>  ? Dtype::kFp32
                             : std::is_same_v<T, Bf16> ? Dtype::kBf16
                                                       : Dtype::kFp16;
    return vector.data != nullptr && vector.dtype == kDtype;
}

// A weight, and bias, of T itself are read as they are stored, for several parts of a row at once.
template <typename T>
__host__ __device__ __forceinline__ bool has_own_vectors(const NormArgs& args) {
    return is_of<T>(args.weight) && (args.bias.data == nullptr || is_of<T>(args.bias));
}

// Such a vector, for kUnitsOfRow accesses of this thread from `first` on.
template <typename T, int N, typename Threads>
__device__ __forceinline__ void load_vector(const NormArgs& args, const FloatVector& vector,
                                            Words<T, N> (&found)[kUnitsOfRow], int first = 0) {
    const T* from = static_cast<const T*>(vector.data);
    each_held<Threads, N>(
        args.cols, [&](int i, int64_t begin) { found[i] = as_bits<Words<T, N>>(read<N>(from + begin)); }, first);
}

// Writes what such vectors make of these accesses.
template <typename T, int N, typename Threads>
__device__ __forceinline__ void write_part(const NormArgs& args, int64_t row, const Words<T, N>* x,
                                           const Words<T, N> (&weight)[kUnitsOfRow],
                                           const Words<T, N> (&bias)[kUnitsOfRow], float mean, float scale,
                                           int first = 0) {
    T* const to = static_cast<T*>(args.out) + row * args.cols;
    const auto normed_of = [&](int i, auto norm) {
        Pack<float, N> normed = widen(as_bits<Pack<T, N>>(x[first + i]));
        const Pack<float, N> factor = widen(as_bits<Pack<T, N>>(weight[i]));
#pragma unroll
        for (int j = 0; j < N; ++j) normed.at[j] = norm((normed.at[j] - mean) * scale, factor.at[j], j);
        return narrow<T>(normed);
    };
    if (args.bias.data != nullptr) {
        each_held<Threads, N>(
            args.cols,
            [&](int i, int64_t begin) {
                const Pack<float, N> added = widen(as_bits<Pack<T, N>>(bias[i]));
                write(to + begin, normed_of(i, [&](float one, float factor, int j) {
                          return __fmaf_rn(one, factor, added.at[j]);
                      }));
            },
            first);
    } else {
        each_held<Threads, N>(
            args.cols,
            [&](int i, int64_t begin) {
                write(to + begin, normed_of(i, [](float one, float factor, int) { return one * factor; }));
            },
            first);
    }
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

template <typename T, int N, typename Threads, int kUnits>
__device__ __forceinline__ float sum_held(const NormArgs& args, const Words<T, N> (&x)[kUnits]) {
    float sum = 0.0f;
    each_held<Threads, N, kUnits>(args.cols, [&](int i, int64_t) {
        sum += sum_of(widen(as_bits<Pack<T, N>>(x[i])), [](float one) { return one; });
    });
    return warp_reduce(sum, Sum{});
}

template <typename T, int N, typename Threads, int kUnits>
__device__ __forceinline__ float squares_held(const NormArgs& args, const Words<T, N> (&x)[kUnits], float mean) {
    float squares = 0.0f;
    each_held<Threads, N, kUnits>(args.cols, [&](int i, int64_t) {
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
template <typename T, int N, int kUnits>
__device__ __forceinline__ Moments moments_of_warp(const NormArgs& args, const Words<T, N> (&x)[kUnits]) {
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
    const bool early = has_own_vectors<T>(args);
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
    if (!early) {
        each_held<Threads, N>(args.cols, [&](int i, int64_t begin) {
            write_normed<T>(args, widen(as_bits<Pack<T, N>>(x[i])), moments.mean, scale, row, begin);
        });
    } else {
        write_part<T, N, Threads>(args, row, x, weight, bias, moments.mean, scale);
    }
}

// Many rows without a residual, with vectors of T, each a warp's although it is long: nothing waits at a barrier. The
// vectors are read when the row's moments are known, a few at a time, as registers are full.
template <typename T, int N>
__global__ void __launch_bounds__(kThreadsOfLongRows, kBlocksOfLongRows) norm_long(NormArgs args) {
    using Threads = RowThreads<true>;
    const int64_t row = Threads::row();
    if (row >= args.rows) return;
    Words<T, N> x[kUnitsOfLongRow];
    const T* from = static_cast<const T*>(args.x) + row * args.cols;
    each_held<Threads, N, kUnitsOfLongRow>(
        args.cols, [&](int i, int64_t begin) { x[i] = as_bits<Words<T, N>>(read<N>(from + begin)); });
    const Moments moments = moments_of_warp<T, N>(args, x);
    const float scale = scale_of(args, moments.squares);
#pragma unroll
    for (int first = 0; first < kUnitsOfLongRow; first += kUnitsOfRow) {
        Words<T, N> weight[kUnitsOfRow], bias[kUnitsOfRow];
        load_vector<T, N, Threads>(args, args.weight, weight, first);
        if (args.bias.data != nullptr) load_vector<T, N, Threads>(args, args.bias, bias, first);
        write_part<T, N, Threads>(args, row, x, weight, bias, moments.mean, scale, first);
    }
}

}  // namespace ds
