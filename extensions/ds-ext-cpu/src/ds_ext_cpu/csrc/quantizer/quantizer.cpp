// Quantization by group for tensors in host memory: `ds_cpu::quantize_groups`, `fake_quantize_groups`,
// `dequantize_groups`, `dequantize_reduce`. Formulas and layout: deepspeed/ops/quantizer/groups.py.

#include "common/half.h"
#include "common/isa.h"
#include "common/rows.h"
#include "quantizer/group_args.h"

#define DS_CPU_LOOPS "quantizer/quantizer_loops.h"
#include "common/each_isa.h"

namespace ds_cpu {

static int64_t pieces_of(int64_t group_size) { return std::max<int64_t>(1, (group_size + kPiece - 1) / kPiece); }

static int64_t grain_of_pieces(int64_t group_size) {
    return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, std::min(group_size, kPiece)));
}

static void check_num_groups(const char* op, const Tensor& x, int64_t num_groups) {
    if (num_groups < 1 || x.numel() % num_groups != 0) {
        refuse({op, "num_groups"}, std::to_string(num_groups),
               "a divisor of the " + std::to_string(x.numel()) + " elements of x");
    }
}

static void check_packed_bits(const char* op, int64_t num_bits) {
    if (num_bits != 8 && num_bits != 4) refuse({op, "num_bits"}, std::to_string(num_bits), "8 or 4");
}

// Quantizes every group of `x`; `args` says what is made of it.
static void run_groups(int64_t num_groups, GroupArgs args) {
    const int64_t grain = grain_of_pieces(args.group_size);
    args.pieces = pieces_of(args.group_size);
    const int64_t count = num_groups * args.pieces;
    std::vector<Range> ranges(args.pieces == 1 ? 0 : count);
    args.ranges = ranges.data();
    if (args.pieces > 1) {
        const auto measure = DS_CPU_CHOOSE(measure_pieces);
        parallel_for(count, grain, [&](int64_t begin, int64_t end) { measure(args, begin, end); });
    }
    const auto convert = DS_CPU_CHOOSE(convert_pieces);
    parallel_for(count, grain, [&](int64_t begin, int64_t end) { convert(args, begin, end); });
}

static std::tuple<Tensor, Tensor> quantize_groups(Tensor x, int64_t num_groups, int64_t num_bits, bool symmetric) {
    const Dtype dtype = check_float_on_host({"quantize_groups", "x"}, x);
    check_num_groups("quantize_groups", x, num_groups);
    check_packed_bits("quantize_groups", num_bits);
    const int64_t group_size = x.numel() / num_groups;
    const Tensor flat = as_contiguous(x);
    const Tensor q = new_tensor(x, {num_groups, (group_size * num_bits + 7) / 8}, torch::headeronly::ScalarType::Char);
    const Tensor params = new_tensor(x, {num_groups, symmetric ? 1 : 2}, torch::headeronly::ScalarType::Float);
    run_groups(num_groups, {.group_size = group_size,
                            .pieces = 1,
                            .num_bits = static_cast<int32_t>(num_bits),
                            .symmetric = symmetric,
                            .dtype = dtype,
                            .x = flat.data_ptr(),
                            // never null: an empty tensor has no memory
                            .q = static_cast<int8_t*>(group_size == 0 ? params.data_ptr() : q.data_ptr()),
                            .out = nullptr,
                            .params = static_cast<float*>(params.data_ptr()),
                            .ranges = nullptr});
    return {q, params};
}

static Tensor fake_quantize_groups(Tensor x, int64_t num_groups, int64_t num_bits, bool symmetric) {
    const Dtype dtype = check_float_on_host({"fake_quantize_groups", "x"}, x);
    check_num_groups("fake_quantize_groups", x, num_groups);
    if (num_bits < 2 || num_bits > 16) {
        refuse({"fake_quantize_groups", "num_bits"}, std::to_string(num_bits), "2 to 16");
    }
    const Tensor flat = as_contiguous(x);
    const Tensor out = new_tensor(x, sizes_of(x));
    run_groups(num_groups, {.group_size = x.numel() / num_groups,
                            .pieces = 1,
                            .num_bits = static_cast<int32_t>(num_bits),
                            .symmetric = symmetric,
                            .dtype = dtype,
                            .x = flat.data_ptr(),
                            .q = nullptr,
                            .out = out.data_ptr(),
                            .params = nullptr,
                            .ranges = nullptr});
    return out;
}

static Dtype dtype_of(const char* op, torch::headeronly::ScalarType dtype) {
    using torch::headeronly::ScalarType;
    if (dtype == ScalarType::Float) return Dtype::kFp32;
    if (dtype == ScalarType::BFloat16) return Dtype::kBf16;
    if (dtype == ScalarType::Half) return Dtype::kFp16;
    refuse({op, "dtype"}, "another dtype", "float32, bfloat16 or float16");
}

// Checks q (..., G, bytes) and params (..., G, 1 or 2), and gives (G, S) numbers of `dtype`: `num_copies` added up.
static Tensor numbers(const char* op, const Tensor& q, const Tensor& params, int64_t num_dims, int64_t group_size,
                      int64_t num_bits, bool mean, torch::headeronly::ScalarType dtype) {
    check_on_host({op, "q"}, q);
    check_on_host({op, "params"}, params);
    if (dtype_code(q) != aoti_torch_dtype_int8()) refuse({op, "q"}, dtype_name(dtype_code(q)), "int8");
    check_fp32({op, "params"}, params);
    check_packed_bits(op, num_bits);
    if (q.dim() != num_dims) refuse({op, "q"}, shape_name(q), num_dims == 2 ? "(G, bytes)" : "(C, G, bytes)");
    bool fits = params.dim() == num_dims && (params.size(num_dims - 1) == 1 || params.size(num_dims - 1) == 2);
    for (int64_t dim = 0; fits && dim < num_dims - 1; ++dim) fits = params.size(dim) == q.size(dim);
    if (!fits) refuse({op, "params"}, shape_name(params), "as q, " + shape_name(q) + ", with 1 or 2 at the end");
    const int64_t group_bytes = q.size(num_dims - 1);
    if (group_size < 0 || (group_size * num_bits + 7) / 8 != group_bytes) {
        refuse({op, "group_size"}, std::to_string(group_size),
               "what " + std::to_string(group_bytes) + " bytes of q hold at " + std::to_string(num_bits) + " bits");
    }
    const Dtype kind = dtype_of(op, dtype);
    const Tensor integers = as_contiguous(q), scales = as_contiguous(params);
    const int64_t num_groups = q.size(num_dims - 2), num_copies = num_dims == 3 ? q.size(0) : 1;
    const Tensor out = new_tensor(q, {num_groups, group_size}, dtype);
    const NumberArgs args{
        .group_size = group_size,
        .group_bytes = group_bytes,
        .pieces = pieces_of(group_size),
        .num_groups = num_groups,
        .num_copies = num_copies,
        .num_bits = static_cast<int32_t>(num_bits),
        .num_params = static_cast<int32_t>(params.size(num_dims - 1)),
        .factor = mean && num_copies > 0 ? static_cast<float>(1.0 / static_cast<double>(num_copies)) : 1.0f,
        .q = static_cast<const int8_t*>(integers.data_ptr()),
        .params = static_cast<const float*>(scales.data_ptr()),
        .dtype = kind,
        .out = out.data_ptr()};
    const auto loop = DS_CPU_CHOOSE(dequantize_pieces);
    parallel_for(num_groups * args.pieces, grain_of_pieces(group_size),
                 [&](int64_t begin, int64_t end) { loop(args, begin, end); });
    return out;
}

static Tensor dequantize_groups(Tensor q, Tensor params, int64_t group_size, int64_t num_bits,
                                torch::headeronly::ScalarType dtype) {
    return numbers("dequantize_groups", q, params, 2, group_size, num_bits, false, dtype);
}

static Tensor dequantize_reduce(Tensor q, Tensor params, int64_t group_size, int64_t num_bits, bool mean,
                                torch::headeronly::ScalarType dtype) {
    return numbers("dequantize_reduce", q, params, 3, group_size, num_bits, mean, dtype);
}

}  // namespace ds_cpu

STABLE_TORCH_LIBRARY_FRAGMENT(ds_cpu, m) {
    m.def("quantize_groups(Tensor x, int num_groups, int num_bits, bool symmetric) -> (Tensor, Tensor)");
    m.def("fake_quantize_groups(Tensor x, int num_groups, int num_bits, bool symmetric) -> Tensor");
    m.def("dequantize_groups(Tensor q, Tensor params, int group_size, int num_bits, ScalarType dtype) -> Tensor");
    m.def(
        "dequantize_reduce(Tensor q, Tensor params, int group_size, int num_bits, bool mean, ScalarType dtype) "
        "-> Tensor");
}

// Of every device, so that a tensor of another one is refused by name.
STABLE_TORCH_LIBRARY_IMPL(ds_cpu, CompositeExplicitAutograd, m) {
    m.impl("quantize_groups", TORCH_BOX(&ds_cpu::quantize_groups));
    m.impl("fake_quantize_groups", TORCH_BOX(&ds_cpu::fake_quantize_groups));
    m.impl("dequantize_groups", TORCH_BOX(&ds_cpu::dequantize_groups));
    m.impl("dequantize_reduce", TORCH_BOX(&ds_cpu::dequantize_reduce));
}
