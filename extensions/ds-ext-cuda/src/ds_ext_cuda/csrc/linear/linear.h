// Linear layers of few rows, as a step of generation has them, with plain, int8 and int4 weights. Formulas:
// deepspeed/ops/transformer/linear.py, and deepspeed/ops/quantizer/packed.py for packed weights.
#pragma once

#include "common/tensors.h"

namespace ds {

// [Note: a linear layer of few rows]
// The time is that of reading the weight once. A warp computes one output for all rows of x: its lanes read
// neighbouring pieces of the row of the weight, and the same pieces of the rows of x, which the first cache has.
// Arithmetic is fp32, rounded once. With more rows than kMostRows the callers take torch's product, which is bound by
// arithmetic.
constexpr int64_t kMostRows = 16;
constexpr int kLinearThreads = 256;
constexpr int kOutsOfBlock = kLinearThreads / kWarpSize;

struct LinearArgs {
    int64_t rows;  // of x
    int64_t cols;
    int64_t outs;
    int64_t row_bytes;   // of the weight
    int64_t group_size;  // elements of a row that share a scale
    int64_t groups;      // of a row
    const void* x;       // (rows, cols)
    const uint8_t* weight;
    const float* scales;  // (outs, groups); null: the weight is not packed
    const float* zeros;   // as scales; null: symmetric
    FloatVector bias;     // (outs)
    void* y;              // (rows, outs)
};

// Kinds of weights: kNumbers of them are read by one access, with kBytes.
template <typename T, int N>
struct Plain {
    static constexpr int kNumbers = N, kBytes = N * static_cast<int>(sizeof(T));
    static __device__ __forceinline__ Pack<float, N> load(const uint8_t* from) {
        return widen(read<N>(reinterpret_cast<const T*>(from)));
    }
};

template <int N>
struct Int8 {
    static constexpr int kNumbers = N, kBytes = N;
    static __device__ __forceinline__ Pack<float, N> load(const uint8_t* from) {
        const Pack<int8_t, N> packed = read<N>(reinterpret_cast<const int8_t*>(from));
        Pack<float, N> wide;
#pragma unroll
        for (int i = 0; i < N; ++i) wide.at[i] = static_cast<float>(packed.at[i]);
        return wide;
    }
};

// Element 2i is the low half of byte i, 2i + 1 the high one, both in two's complement.
template <int N>
struct Int4 {
    static constexpr int kNumbers = N, kBytes = N / 2;
    static __device__ __forceinline__ Pack<float, N> load(const uint8_t* from) {
        const Pack<uint8_t, N / 2> packed = read<N / 2>(from);
        Pack<float, N> wide;
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            const int byte = packed.at[i];
            wide.at[2 * i] = static_cast<float>(((byte & 15) ^ 8) - 8);
            wide.at[2 * i + 1] = static_cast<float>(((byte >> 4) ^ 8) - 8);
        }
        return wide;
    }
};

template <typename T, typename W, int kRows>
__global__ void __launch_bounds__(kLinearThreads) linear_kernel(LinearArgs args) {
    const int64_t out = static_cast<int64_t>(blockIdx.x) * kOutsOfBlock + threadIdx.x / kWarpSize;
    if (out >= args.outs) return;  // all threads of a warp
    constexpr int N = W::kNumbers;
    const int lane = threadIdx.x % kWarpSize;
    const uint8_t* weight = args.weight + out * args.row_bytes;
    const T* x = static_cast<const T*>(args.x);
    float totals[kRows] = {};
    for (int64_t unit = lane; unit < args.cols / N; unit += kWarpSize) {
        const Pack<float, N> numbers = W::load(weight + unit * W::kBytes);
        float scale = 1.0f, zero = 0.0f;
        if (args.scales != nullptr) {
            const int64_t group = out * args.groups + quotient(unit * N, args.group_size);
            scale = args.scales[group];
            if (args.zeros != nullptr) zero = args.zeros[group];
        }
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
            if (row >= args.rows) break;
            const Pack<float, N> factors = widen(read<N>(x + row * args.cols + unit * N));
            float sum = 0.0f, plain = 0.0f;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                sum = fmaf(numbers.at[i], factors.at[i], sum);
                plain += factors.at[i];
            }
            totals[row] = fmaf(scale, sum, totals[row]);
            if (args.zeros != nullptr) totals[row] = fmaf(zero, plain, totals[row]);
        }
    }
    const float bias = args.bias.get<1>(out, 0.0f).at[0];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
        if (row >= args.rows) break;
        const float total = warp_reduce(totals[row], Sum{});
        if (lane == 0) static_cast<T*>(args.y)[row * args.outs + out] = narrow<T>(total + bias);
    }
}

template <typename T, typename W>
static void run_linear(const char* op, const Tensor& x, const LinearArgs& args) {
    const OnDevice device(x);
    const auto kernel = args.rows == 1   ? linear_kernel<T, W, 1>
                        : args.rows <= 4 ? linear_kernel<T, W, 4>
                                         : linear_kernel<T, W, kMostRows>;
    launch(kernel, grid_of({op, "x"}, divide_up(args.outs, kOutsOfBlock)), kLinearThreads, device.stream(), args);
}

// Whether rows of x and of the weight can be read N numbers at a time, of one group each.
template <typename T, int N>
static bool reads_together(const LinearArgs& args, int64_t bytes) {
    const bool x_fits = is_aligned<N>(static_cast<const T*>(args.x), args.cols);
    return x_fits && args.group_size % N == 0 && is_aligned<16>(args.weight, args.row_bytes) && bytes == 16;
}

// x (..., cols) as rows, and a result of its dtype.
struct LinearCall {
    LinearCall(const char* op, const Tensor& given, const std::optional<Tensor>& bias, LinearArgs args)
        : dtype(check_float_on_device({op, "x"}, given)), x(as_contiguous(given)), args(args) {
        if (check_rows({op, "x"}, given).cols != args.cols) {
            refuse({op, "x"}, shape_name(given), "with " + std::to_string(args.cols) + " at the end");
        }
        int64_t rows = 1;  // also where they have no columns
        for (int64_t dim = 0; dim + 1 < given.dim(); ++dim) rows *= given.size(dim);
        if (rows > kMostRows) {
            refuse({op, "x"}, std::to_string(rows) + " rows", "of " + std::to_string(kMostRows) + " or fewer");
        }
        held = check_bias(op, bias, args.outs, given);
        std::vector<int64_t> sizes = sizes_of(given);
        sizes.back() = args.outs;
        y.emplace(new_tensor(given, sizes));
        this->args.rows = rows;
        this->args.x = x.data_ptr();
        this->args.bias = held.vector;
        this->args.y = y->data_ptr();
    }

    static HeldVector check_bias(const char* op, const std::optional<Tensor>& bias, int64_t outs, const Tensor& x) {
        if (bias.has_value() && (bias->dim() != 1 || bias->size(0) != outs)) {
            refuse({op, "bias"}, shape_name(*bias), "(" + std::to_string(outs) + "), one for each output");
        }
        return check_vector({op, "bias"}, bias, outs, x);
    }

    // Whether there is anything to compute.
    bool has_work() const { return args.rows > 0 && args.outs > 0; }

    Dtype dtype;
    Tensor x;
    HeldVector held;
    std::optional<Tensor> y;
    LinearArgs args;
};

static Tensor linear(Tensor x, Tensor weight, std::optional<Tensor> bias) {
    const char* const op = "linear";
    check_on_device({op, "x"}, x);
    check_beside({op, "weight"}, weight, x, "x");
    check_same_dtype({op, "weight"}, weight, x, "x");
    if (weight.dim() != 2) refuse({op, "weight"}, shape_name(weight), "(out, in)");
    const Tensor rows = as_contiguous(weight);
    const int64_t cols = weight.size(1);
    LinearCall call(op, x, bias, {.cols = cols, .outs = weight.size(0), .group_size = cols, .groups = 1});
    if (!call.has_work()) return *call.y;
    call.args.weight = data_of<uint8_t>(rows);
    by_dtype(call.dtype, [&](auto one) {
        using T = decltype(one);
        constexpr int N = kWide<T>;
        call.args.row_bytes = cols * static_cast<int64_t>(sizeof(T));
        reads_together<T, N>(call.args, 16) ? run_linear<T, Plain<T, N>>(op, x, call.args)
                                            : run_linear<T, Plain<T, 1>>(op, x, call.args);
    });
    return *call.y;
}

// (out, groups) of fp32, beside the data.
static Tensor check_of_groups(const Argument& argument, const Tensor& tensor, const Tensor& data,
                              const Tensor& scales) {
    check_beside(argument, tensor, data, "data");
    check_fp32(argument, tensor);
    if (tensor.dim() != 2 || tensor.size(0) != data.size(0) || tensor.size(1) == 0) {
        refuse(argument, shape_name(tensor), "(" + std::to_string(data.size(0)) + ", groups), a row for each of data");
    }
    check_same_shape(argument, tensor, scales, "scales");
    return as_contiguous(tensor);
}

// `input_bits` allows to round x, which is no gain here: the weight is what takes the time.
static Tensor packed_linear(Tensor x, Tensor data, Tensor scales, std::optional<Tensor> zeros,
                            std::optional<Tensor> bias, int64_t bits, int64_t input_bits) {
    const char* const op = "packed_linear";
    check_on_device({op, "x"}, x);
    check_beside({op, "data"}, data, x, "x");
    if (dtype_code(data) != aoti_torch_dtype_int8()) refuse({op, "data"}, dtype_name(dtype_code(data)), "int8");
    if (data.dim() != 2) refuse({op, "data"}, shape_name(data), "(out, bytes of a row)");
    if (bits != 8 && bits != 4) refuse({op, "bits"}, std::to_string(bits), "8 or 4");
    if (input_bits != 16 && input_bits != 8) refuse({op, "input_bits"}, std::to_string(input_bits), "16 or 8");
    const Tensor rows = as_contiguous(data), held = check_of_groups({op, "scales"}, scales, data, scales);
    std::optional<Tensor> minima;
    if (zeros.has_value()) minima = check_of_groups({op, "zeros"}, *zeros, data, scales);
    const int64_t groups = scales.size(1), row_bytes = data.size(1);
    if (row_bytes % groups != 0) {
        refuse({op, "scales"}, shape_name(scales),
               "with a divisor of the " + std::to_string(row_bytes) + " bytes of a row at the end");
    }
    const int64_t cols = row_bytes * 8 / bits;
    LinearCall call(op, x, bias,
                    {.cols = cols,
                     .outs = data.size(0),
                     .row_bytes = row_bytes,
                     .group_size = cols / groups,
                     .groups = groups,
                     .weight = data_of<uint8_t>(rows),
                     .scales = data_of<float>(held),
                     .zeros = minima.has_value() ? data_of<float>(*minima) : nullptr});
    if (!call.has_work()) return *call.y;
    by_dtype(call.dtype, [&](auto one) {
        using T = decltype(one);
        if (bits == 8) {
            reads_together<T, 16>(call.args, 16) ? run_linear<T, Int8<16>>(op, x, call.args)
                                                 : run_linear<T, Int8<1>>(op, x, call.args);
        } else {
            reads_together<T, 32>(call.args, 16) ? run_linear<T, Int4<32>>(op, x, call.args)
                                                 : run_linear<T, Int4<2>>(op, x, call.args);
        }
    });
    return *call.y;
}

}  // namespace ds
