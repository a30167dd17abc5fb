// Linear layers of few rows for tensors in host memory, with fp32, bf16, int8 and int4 weights. Formulas:
// deepspeed/ops/transformer/linear.py, and deepspeed/ops/quantizer/packed.py for quantized weights.
#pragma once

#include <type_traits>

#include "common/aligned.h"
#include "common/rows.h"
#include "linear/bf16_pass.h"
#include "linear/linear_args.h"

namespace ds_cpu {

// Bytes of a weight below which waking another thread costs more than it saves.
constexpr int64_t kGrainBytes = 131072;

// The loops of one kind of weight in the pass that is used, and the numbers of a block of the widest such pass.
struct LinearPass {
    void (*prepare)(const LinearArgs&);
    void (*loop)(const LinearArgs&, int64_t, int64_t);
    int64_t block;
};

// With bf16 products where x is bf16 and no group ends within a block.
template <typename W>
static LinearPass linear_pass(const LinearArgs& args) {
#if defined(DS_CPU_X86)
    if constexpr (!std::is_same_v<W, float>) {
        constexpr int64_t kBlock = avx512bf16::Bf16Products::kBlock;
        if (args.dtype == Dtype::kBf16 && has_bf16_products() && (args.groups == 1 || args.group_size % kBlock == 0)) {
            return {&avx512bf16::prepare_linear_bf16<W>, &avx512bf16::linear_outs_bf16<W>, kBlock};
        }
    }
#endif
    return {DS_CPU_CHOOSE(prepare_linear<W>), DS_CPU_CHOOSE(linear_outs<W>), 32};
}

// y of x (..., in): `args` has what the weight is, the rest is filled in here.
template <typename W>
static Tensor run_linear(const char* op, const Tensor& x, const std::optional<Tensor>& bias, LinearArgs args) {
    args.dtype = check_float_on_host({op, "x"}, x);
    const Rows rows = check_rows({op, "x"}, x);
    const int64_t cols = args.groups * args.group_size;
    if (rows.cols != cols) refuse({op, "x"}, shape_name(x), "with " + std::to_string(cols) + " at the end");
    if (rows.count > kMostRows) {
        refuse({op, "x"}, std::to_string(rows.count) + " rows", "of " + std::to_string(kMostRows) + " or fewer");
    }
    std::optional<FloatRow> biases;
    if (bias.has_value()) biases.emplace(Argument{op, "bias"}, bias, args.outs, 0.0f);
    std::vector<int64_t> sizes = sizes_of(x);
    sizes.back() = args.outs;
    const Tensor from = as_contiguous(x), y = new_tensor(x, sizes);
    if (rows.count == 0 || args.outs == 0) return y;
    args.rows = rows.count;
    args.padded_rows = 1;
    while (args.padded_rows < rows.count) args.padded_rows *= 2;
    const LinearPass pass = linear_pass<W>(args);
    args.group_stride = (args.group_size + pass.block - 1) / pass.block * pass.block;
    const AlignedFloats copy(args.padded_rows * args.groups * (args.group_stride + 1));
    args.x = from.data_ptr();
    args.copy = copy.data();
    args.sums = args.zeros == nullptr ? nullptr : copy.data() + args.padded_rows * args.groups * args.group_stride;
    args.bias = biases.has_value() ? biases->data() : nullptr;
    args.y = y.data_ptr();
    pass.prepare(args);
    const int64_t grain = std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, args.groups * args.group_bytes));
    parallel_for(args.outs, grain, [&](int64_t begin, int64_t end) { pass.loop(args, begin, end); });
    return y;
}

static Tensor linear(Tensor x, Tensor weight, std::optional<Tensor> bias) {
    const Dtype dtype = check_float_on_host({"linear", "weight"}, weight);
    if (dtype == Dtype::kFp16) refuse({"linear", "weight"}, "dtype float16", "float32 or bfloat16");
    if (weight.dim() != 2) refuse({"linear", "weight"}, shape_name(weight), "(out, in)");
    check_on_host({"linear", "x"}, x);
    check_same_dtype({"linear", "x"}, x, weight, "weight");
    const Tensor rows = as_contiguous(weight);
    const bool wide = dtype == Dtype::kFp32;
    LinearArgs args{};
    args.outs = weight.size(0);
    args.groups = 1;
    args.group_size = weight.size(1);
    args.group_bytes = weight.size(1) * (wide ? 4 : 2);
    args.weight = static_cast<const uint8_t*>(rows.data_ptr());
    return wide ? run_linear<float>("linear", x, bias, args) : run_linear<Bf16>("linear", x, bias, args);
}

// (out, groups) of fp32, on the host.
static Tensor check_of_groups(const char* name, const Tensor& tensor, int64_t outs, const Tensor& scales) {
    const Argument argument{"packed_linear", name};
    check_on_host(argument, tensor);
    check_fp32(argument, tensor);
    if (tensor.dim() != 2 || tensor.size(0) != outs || tensor.size(1) == 0) {
        refuse(argument, shape_name(tensor), "(" + std::to_string(outs) + ", groups), a row for each of data");
    }
    check_same_shape(argument, tensor, scales, "scales");
    return as_contiguous(tensor);
}

static Tensor packed_linear(Tensor x, Tensor data, Tensor scales, std::optional<Tensor> zeros,
                            std::optional<Tensor> bias, int64_t bits) {
    const char* const op = "packed_linear";
    check_on_host({op, "data"}, data);
    if (dtype_code(data) != aoti_torch_dtype_int8()) refuse({op, "data"}, dtype_name(dtype_code(data)), "int8");
    if (data.dim() != 2) refuse({op, "data"}, shape_name(data), "(out, bytes of a row)");
    if (bits != 8 && bits != 4) refuse({op, "bits"}, std::to_string(bits), "8 or 4");
    const Tensor rows = as_contiguous(data), of_groups = check_of_groups("scales", scales, data.size(0), scales);
    std::optional<Tensor> offsets;
    if (zeros.has_value()) offsets = check_of_groups("zeros", *zeros, data.size(0), scales);
    LinearArgs args{};
    args.outs = data.size(0);
    args.groups = scales.size(1);
    if (data.size(1) % args.groups != 0) {
        refuse({op, "scales"}, shape_name(scales),
               "with a divisor of the " + std::to_string(data.size(1)) + " bytes of a row at the end");
    }
    args.group_bytes = data.size(1) / args.groups;
    args.group_size = args.group_bytes * 8 / bits;
    args.weight = static_cast<const uint8_t*>(rows.data_ptr());
    args.scales = static_cast<const float*>(of_groups.data_ptr());
    args.zeros = offsets.has_value() ? static_cast<const float*>(offsets->data_ptr()) : nullptr;
    return bits == 8 ? run_linear<Int8>(op, x, bias, args) : run_linear<Int4Pair>(op, x, bias, args);
}

}  // namespace ds_cpu
