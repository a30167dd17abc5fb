// Linear layers of few rows for tensors in host memory, with fp32, bf16, int8 and int4 weights; experts. Formulas:
// deepspeed/ops/transformer/linear.py, and deepspeed/ops/quantizer/packed.py for quantized weights.
#pragma once

#include <memory>
#include <type_traits>
#include <vector>

#include "common/aligned.h"
#include "common/rows.h"
#include "linear/bf16_pass.h"
#include "linear/linear_args.h"
#include "linear/vnni_pass.h"

namespace ds_cpu {

// Bytes of a weight below which waking another thread costs more than it saves.
constexpr int64_t kGrainBytes = 131072;

// The loops of one kind of weight in the pass that is used, and the numbers of a block of the widest such pass.
struct LinearPass {
    void (*prepare)(const LinearArgs&);
    void (*loop)(const LinearArgs&, int64_t, int64_t);
    int64_t block;
};

// Rows of x up to which bf16 products are faster than those of fp32, which the machine has twice as many of in a
// second: then the weight's reading hides them, and with more rows its widening is shared.
constexpr int64_t kMostBf16Rows = 2;

// In integers where the weight is and x is bf16 or may be rounded to 8 bits, else with bf16 products where x is bf16
// and no group ends within a block.
template <typename W>
static LinearPass linear_pass(const LinearArgs& args) {
#if defined(DS_CPU_X86)
    if constexpr (std::is_same_v<W, Int8> || std::is_same_v<W, Int4Pair>) {
        constexpr int64_t kBlock = avx512vnni::kNumbersAtOnce<W>;
        if (has_byte_products() && args.input_bits == 8 && args.dtype != Dtype::kFp16) {
            return {&avx512vnni::prepare_linear_vnni<W, 1>, &avx512vnni::linear_outs_vnni<W, 1>, kBlock};
        }
        if (has_byte_products() && args.dtype == Dtype::kBf16) {
            return {&avx512vnni::prepare_linear_vnni<W, 2>, &avx512vnni::linear_outs_vnni<W, 2>, kBlock};
        }
    }
    if constexpr (!std::is_same_v<W, float>) {
        constexpr int64_t kBlock = avx512bf16::Bf16Products::kBlock;
        const bool is_even = args.groups == 1 || args.group_size % kBlock == 0;
        if (args.dtype == Dtype::kBf16 && has_bf16_products() && is_even && args.padded_rows <= kMostBf16Rows) {
            return {&avx512bf16::prepare_linear_bf16<W>, &avx512bf16::linear_outs_bf16<W>, kBlock};
        }
    }
#endif
    return {DS_CPU_CHOOSE(prepare_linear<W>), DS_CPU_CHOOSE(linear_outs<W>), 32};
}

// y (rows, outs) of x (rows, in), both contiguous: copies x when it is made, then computes ranges of the outputs.
template <typename W>
class LinearRun {
  public:
    // `args` has what the weight is, the rest is filled in here.
    LinearRun(const LinearArgs& args, Dtype dtype, const void* x, int64_t rows, const float* bias, void* y)
        : args_(args) {
        args_.dtype = dtype;
        args_.rows = rows;
        args_.padded_rows = 1;
        while (args_.padded_rows < rows) args_.padded_rows *= 2;
        pass_ = linear_pass<W>(args_);
        args_.group_stride = (args_.group_size + pass_.block - 1) / pass_.block * pass_.block;
        copy_ = std::make_unique<AlignedFloats>(args_.padded_rows * args_.groups * (args_.group_stride + 1));
        args_.x = x;
        args_.copy = copy_->data();
        args_.sums =
            args_.zeros == nullptr ? nullptr : copy_->data() + args_.padded_rows * args_.groups * args_.group_stride;
        args_.bias = bias;
        args_.y = y;
        pass_.prepare(args_);
    }

    void compute(int64_t begin, int64_t end) const { pass_.loop(args_, begin, end); }

  private:
    LinearArgs args_;
    LinearPass pass_;
    std::unique_ptr<AlignedFloats> copy_;
};

// Outputs of a weight below which waking another thread costs more than it saves.
static inline int64_t grain_of_outs(const LinearArgs& args) {
    return std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, args.groups * args.group_bytes));
}

template <typename W>
static void compute_linear(const LinearArgs& args, Dtype dtype, const void* x, int64_t rows, const float* bias,
                           void* y) {
    const LinearRun<W> run(args, dtype, x, rows, bias, y);
    parallel_for(args.outs, grain_of_outs(args), [&](int64_t begin, int64_t end) { run.compute(begin, end); });
}

// `counts[0]` rows of x with the first of several weights, which lie one below the other in that of `args`, and so on.
// Weights without rows are not read; threads share the outputs of the others.
template <typename W>
static void compute_grouped(const LinearArgs& args, Dtype dtype, const void* x, const std::vector<int64_t>& counts,
                            const float* bias, void* y) {
    const int64_t outs = args.outs / static_cast<int64_t>(counts.size()), bytes = dtype == Dtype::kFp32 ? 4 : 2;
    auto* from = static_cast<const uint8_t*>(x);
    auto* to = static_cast<uint8_t*>(y);
    LinearArgs one = args;
    one.outs = outs;
    std::vector<LinearRun<W>> runs;
    for (const int64_t rows : counts) {
        if (rows > 0) runs.emplace_back(one, dtype, from, rows, bias, to);
        from += rows * args.groups * args.group_size * bytes;
        to += rows * outs * bytes;
        one.weight += outs * args.groups * args.group_bytes;
        one.scales += outs * args.groups;
        if (one.zeros != nullptr) one.zeros += outs * args.groups;
        if (bias != nullptr) bias += outs;
    }
    const int64_t all_outs = static_cast<int64_t>(runs.size()) * outs;
    parallel_for(all_outs, grain_of_outs(args), [&](int64_t begin, int64_t end) {
        while (begin < end) {
            const int64_t run = begin / outs, stop = std::min(end, (run + 1) * outs);
            runs[run].compute(begin - run * outs, stop - run * outs);
            begin = stop;
        }
    });
}

// How the arguments of a weight are called in an operator's schema.
struct WeightNames {
    const char* op;
    const char* weight;
    const char* scales;
    const char* zeros;
    const char* bias;
};

// A checked weight of a linear layer, plain or packed, and what its pointers lead to.
class HeldWeight {
  public:
    HeldWeight(const WeightNames& names, const Tensor& weight) : names_(names) {
        const Argument argument{names.op, names.weight};
        dtype_ = check_float_on_host(argument, weight);
        if (*dtype_ == Dtype::kFp16) refuse(argument, "dtype float16", "float32 or bfloat16");
        if (weight.dim() != 2) refuse(argument, shape_name(weight), "(out, in)");
        rows_ = as_contiguous(weight);
        args_.outs = weight.size(0);
        args_.groups = 1;
        args_.group_size = weight.size(1);
        args_.group_bytes = weight.size(1) * (*dtype_ == Dtype::kFp32 ? 4 : 2);
        args_.weight = static_cast<const uint8_t*>(rows_->data_ptr());
    }

    HeldWeight(const WeightNames& names, const Tensor& data, const Tensor& scales, const std::optional<Tensor>& zeros,
               int64_t bits, int64_t input_bits)
        : names_(names), bits_(bits) {
        const Argument argument{names.op, names.weight};
        check_on_host(argument, data);
        if (dtype_code(data) != aoti_torch_dtype_int8()) refuse(argument, dtype_name(dtype_code(data)), "int8");
        if (data.dim() != 2) refuse(argument, shape_name(data), "(out, bytes of a row)");
        if (bits != 8 && bits != 4) refuse({names.op, "bits"}, std::to_string(bits), "8 or 4");
        if (input_bits != 16 && input_bits != 8) {
            refuse({names.op, "input_bits"}, std::to_string(input_bits), "16 or 8");
        }
        args_.input_bits = input_bits;
        rows_ = as_contiguous(data);
        scales_ = check_of_groups({names.op, names.scales}, scales, scales);
        if (zeros.has_value()) zeros_ = check_of_groups({names.op, names.zeros}, *zeros, scales);
        args_.groups = scales.size(1);
        if (data.size(1) % args_.groups != 0) {
            refuse({names.op, names.scales}, shape_name(scales),
                   "with a divisor of the " + std::to_string(data.size(1)) + " bytes of a row at the end");
        }
        args_.outs = data.size(0);
        args_.group_bytes = data.size(1) / args_.groups;
        args_.group_size = args_.group_bytes * 8 / bits;
        args_.weight = static_cast<const uint8_t*>(rows_->data_ptr());
        args_.scales = static_cast<const float*>(scales_->data_ptr());
        args_.zeros = zeros_.has_value() ? static_cast<const float*>(zeros_->data_ptr()) : nullptr;
    }

    void hold_bias(const std::optional<Tensor>& bias) {
        if (bias.has_value()) bias_.emplace(Argument{names_.op, names_.bias}, bias, args_.outs, 0.0f);
    }
    int64_t outs() const { return args_.outs; }
    int64_t cols() const { return args_.groups * args_.group_size; }
    // Of a plain weight.
    std::optional<Dtype> dtype() const { return dtype_; }

    void compute(Dtype dtype, const void* x, int64_t rows, void* y) const {
        const float* bias = bias_.has_value() ? bias_->data() : nullptr;
        if (bits_ == 8) return compute_linear<Int8>(args_, dtype, x, rows, bias, y);
        if (bits_ == 4) return compute_linear<Int4Pair>(args_, dtype, x, rows, bias, y);
        if (*dtype_ == Dtype::kFp32) return compute_linear<float>(args_, dtype, x, rows, bias, y);
        compute_linear<Bf16>(args_, dtype, x, rows, bias, y);
    }
    // Of packed weights.
    void compute_of_groups(Dtype dtype, const void* x, const std::vector<int64_t>& counts, void* y) const {
        const float* bias = bias_.has_value() ? bias_->data() : nullptr;
        if (bits_ == 8) return compute_grouped<Int8>(args_, dtype, x, counts, bias, y);
        compute_grouped<Int4Pair>(args_, dtype, x, counts, bias, y);
    }

  private:
    // (out, groups) of fp32, on the host.
    Tensor check_of_groups(const Argument& argument, const Tensor& tensor, const Tensor& scales) const {
        check_on_host(argument, tensor);
        check_fp32(argument, tensor);
        const int64_t outs = rows_->size(0);
        if (tensor.dim() != 2 || tensor.size(0) != outs || tensor.size(1) == 0) {
            refuse(argument, shape_name(tensor), "(" + std::to_string(outs) + ", groups), a row for each of data");
        }
        check_same_shape(argument, tensor, scales, "scales");
        return as_contiguous(tensor);
    }

    WeightNames names_;
    int64_t bits_ = 0;
    std::optional<Dtype> dtype_;
    std::optional<Tensor> rows_, scales_, zeros_;
    std::optional<FloatRow> bias_;
    LinearArgs args_{};
};

// y of x (..., in).
static Tensor run_linear(const char* op, const Tensor& x, const std::optional<Tensor>& bias, HeldWeight* weight) {
    const Dtype dtype = check_float_on_host({op, "x"}, x);
    const Rows rows = check_rows({op, "x"}, x);
    if (rows.cols != weight->cols()) {
        refuse({op, "x"}, shape_name(x), "with " + std::to_string(weight->cols()) + " at the end");
    }
    if (rows.count > kMostRows) {
        refuse({op, "x"}, std::to_string(rows.count) + " rows", "of " + std::to_string(kMostRows) + " or fewer");
    }
    weight->hold_bias(bias);
    std::vector<int64_t> sizes = sizes_of(x);
    sizes.back() = weight->outs();
    const Tensor from = as_contiguous(x), y = new_tensor(x, sizes);
    if (rows.count > 0 && weight->outs() > 0) weight->compute(dtype, from.data_ptr(), rows.count, y.data_ptr());
    return y;
}

static Tensor linear(Tensor x, Tensor weight, std::optional<Tensor> bias) {
    HeldWeight held({"linear", "weight", "", "", "bias"}, weight);
    check_on_host({"linear", "x"}, x);
    check_same_dtype({"linear", "x"}, x, weight, "weight");
    return run_linear("linear", x, bias, &held);
}

static Tensor packed_linear(Tensor x, Tensor data, Tensor scales, std::optional<Tensor> zeros,
                            std::optional<Tensor> bias, int64_t bits, int64_t input_bits) {
    HeldWeight held({"packed_linear", "data", "scales", "zeros", "bias"}, data, scales, zeros, bits, input_bits);
    return run_linear("packed_linear", x, bias, &held);
}

// y (rows, out) of x (rows, in), sorted by weight; data (weights * out, bytes of a row).
static Tensor packed_grouped_linear(Tensor x, Tensor data, Tensor scales, std::optional<Tensor> zeros,
                                    std::optional<Tensor> bias, std::vector<int64_t> counts, int64_t bits,
                                    int64_t input_bits) {
    const char* const op = "packed_grouped_linear";
    HeldWeight held({op, "data", "scales", "zeros", "bias"}, data, scales, zeros, bits, input_bits);
    const Dtype dtype = check_float_on_host({op, "x"}, x);
    if (x.dim() != 2 || x.size(1) != held.cols()) {
        refuse({op, "x"}, shape_name(x), "(rows, " + std::to_string(held.cols()) + ")");
    }
    const int64_t num_weights = static_cast<int64_t>(counts.size());
    if (num_weights == 0 || held.outs() % num_weights != 0) {
        refuse({op, "counts"}, std::to_string(num_weights) + " numbers",
               "a divisor of the " + std::to_string(held.outs()) + " rows of data");
    }
    int64_t rows = 0;
    for (int64_t number = 0; number < num_weights; ++number) {
        if (counts[number] < 0 || counts[number] > kMostRows) {
            refuse({op, "counts", number}, std::to_string(counts[number]), "0 to " + std::to_string(kMostRows));
        }
        rows += counts[number];
    }
    if (rows != x.size(0)) {
        refuse({op, "counts"}, std::to_string(rows) + " rows", "the " + std::to_string(x.size(0)) + " of x");
    }
    held.hold_bias(bias);
    const Tensor from = as_contiguous(x), y = new_tensor(x, {rows, held.outs() / num_weights});
    if (y.numel() > 0) held.compute_of_groups(dtype, from.data_ptr(), counts, y.data_ptr());
    return y;
}

}  // namespace ds_cpu
