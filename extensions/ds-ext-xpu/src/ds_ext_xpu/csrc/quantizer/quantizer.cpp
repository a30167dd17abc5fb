// Quantization by group for tensors on the device: `ds_xpu::quantize_groups`, `fake_quantize_groups`,
// `dequantize_groups`, `dequantize_reduce`. Formulas and layout: deepspeed/ops/quantizer/groups.py.

#include <tuple>

#include "common/tensors.h"
#include "quantizer/quantizer_kernel.h"

namespace ds_xpu {

using torch::headeronly::ScalarType;

static void check_num_groups(const char* op, const Tensor& x, int64_t num_groups) {
    if (num_groups < 1 || x.numel() % num_groups != 0) {
        refuse({op, "num_groups"}, std::to_string(num_groups),
               "a divisor of the " + std::to_string(x.numel()) + " elements of x");
    }
}

static void check_packed_bits(const char* op, int64_t num_bits) {
    if (num_bits != 8 && num_bits != 4) refuse({op, "num_bits"}, std::to_string(num_bits), "8 or 4");
}

// Everything but where the results go.
static QuantizeArgs quantize_args(const Argument& x_name, const Tensor& x, int64_t num_groups, int64_t num_bits,
                                  bool symmetric) {
    const double half = static_cast<double>(int64_t{1} << (num_bits - 1));
    const double top = symmetric ? half - 1 : 2 * half - 1;
    return {.group_size = x.numel() / num_groups,
            .group_bytes = (x.numel() / num_groups * num_bits + 7) / 8,
            .num_pieces = std::max<int64_t>(1, (x.numel() / num_groups + kPiece - 1) / kPiece),
            .packed = num_bits == 4,
            .symmetric = symmetric,
            .bottom = static_cast<float>(symmetric ? 1 - half : 0),
            .top = static_cast<float>(top),
            .back = static_cast<float>(symmetric ? 0 : half),
            .per_level = static_cast<float>(1 / top),
            .x = array_of(x_name, x),
            .ranges = nullptr,
            .q = nullptr,
            .params = nullptr,
            .out = {}};
}

// Quantizes every group of `x`; `args` says what is made of it.
static void run_quantize(const Tensor& x, int64_t num_groups, QuantizeArgs args) {
    sycl::queue& queue = current_queue(device_index_of(x));
    const int64_t num_pieces = num_groups * args.num_pieces, group_size = group_size_for(args.group_size);
    std::optional<Tensor> ranges;
    if (args.num_pieces > 1) {
        ranges = new_tensor(x, {num_pieces, 2}, ScalarType::Float);
        args.ranges = static_cast<float*>(data_of(*ranges));
        DS_XPU_LAUNCH(queue, measure_kernel, num_pieces, group_size, args);
    }
    DS_XPU_LAUNCH(queue, quantize_kernel, num_pieces, group_size, args);
}

static std::tuple<Tensor, Tensor> quantize_groups(Tensor x, int64_t num_groups, int64_t num_bits, bool symmetric) {
    const Argument x_name{"quantize_groups", "x"};
    check_on_device(x_name, x);
    check_num_groups("quantize_groups", x, num_groups);
    check_packed_bits("quantize_groups", num_bits);
    const Tensor from = as_contiguous(x);
    QuantizeArgs args = quantize_args(x_name, from, num_groups, num_bits, symmetric);
    const Tensor q = new_tensor(x, {num_groups, args.group_bytes}, ScalarType::Char);
    const Tensor params = new_tensor(x, {num_groups, symmetric ? 1 : 2}, ScalarType::Float);
    args.params = static_cast<float*>(data_of(params));
    // an empty tensor has no memory, and null would mean another result; nothing is written there then
    args.q = static_cast<int8_t*>(args.group_bytes == 0 ? data_of(params) : data_of(q));
    run_quantize(x, num_groups, args);
    return {q, params};
}

static Tensor fake_quantize_groups(Tensor x, int64_t num_groups, int64_t num_bits, bool symmetric) {
    const Argument x_name{"fake_quantize_groups", "x"};
    check_on_device(x_name, x);
    check_num_groups("fake_quantize_groups", x, num_groups);
    if (num_bits < 2 || num_bits > 16) {
        refuse({"fake_quantize_groups", "num_bits"}, std::to_string(num_bits), "2 to 16");
    }
    const Tensor from = as_contiguous(x), out = new_tensor(x, sizes_of(x));
    QuantizeArgs args = quantize_args(x_name, from, num_groups, num_bits, symmetric);
    args.out = array_of({"fake_quantize_groups", "out"}, out);
    if (x.numel() > 0) run_quantize(x, num_groups, args);
    return out;
}

static void check_output_dtype(const char* op, ScalarType dtype) {
    if (dtype != ScalarType::Float && dtype != ScalarType::BFloat16 && dtype != ScalarType::Half) {
        refuse({op, "dtype"}, "another dtype", "float32, bfloat16 or float16");
    }
}

// q (..., G, bytes) and params (..., G, 1 or 2) fit each other, the number of bits and the group size.
static void check_quantized(const char* op, const Tensor& q, const Tensor& params, int64_t num_dims, int64_t group_size,
                            int64_t num_bits) {
    check_on_device({op, "q"}, q);
    check_beside({op, "params"}, params, q, "q");
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
}

// (G, S) numbers of `dtype`: the copies of q added up.
static Tensor numbers(const char* op, const Tensor& q, const Tensor& params, int64_t num_dims, int64_t group_size,
                      int64_t num_bits, bool mean, ScalarType dtype) {
    check_quantized(op, q, params, num_dims, group_size, num_bits);
    check_output_dtype(op, dtype);
    const Tensor integers = as_contiguous(q), scales = as_contiguous(params);
    const int64_t num_groups = q.size(num_dims - 2), num_copies = num_dims == 3 ? q.size(0) : 1;
    const Tensor out = new_tensor(q, {num_groups, group_size}, dtype);
    const double factor = mean && num_copies > 0 ? 1.0 / static_cast<double>(num_copies) : 1.0;
    const DequantizeArgs args{.numel = num_groups * group_size,
                              .group_size = group_size,
                              .group_bytes = q.size(num_dims - 1),
                              .num_groups = num_groups,
                              .num_copies = num_copies,
                              .packed = num_bits == 4,
                              .num_params = static_cast<int32_t>(params.size(num_dims - 1)),
                              .factor = static_cast<float>(factor),
                              .q = static_cast<const int8_t*>(data_of(integers)),
                              .params = static_cast<const float*>(data_of(scales)),
                              .out = array_of({op, "out"}, out)};
    if (args.numel > 0) {
        DS_XPU_LAUNCH(current_queue(device_index_of(q)), dequantize_kernel, groups_for(args.numel), kGroupSize, args);
    }
    return out;
}

static Tensor dequantize_groups(Tensor q, Tensor params, int64_t group_size, int64_t num_bits, ScalarType dtype) {
    return numbers("dequantize_groups", q, params, 2, group_size, num_bits, false, dtype);
}

static Tensor dequantize_reduce(Tensor q, Tensor params, int64_t group_size, int64_t num_bits, bool mean,
                                ScalarType dtype) {
    return numbers("dequantize_reduce", q, params, 3, group_size, num_bits, mean, dtype);
}

}  // namespace ds_xpu

STABLE_TORCH_LIBRARY_FRAGMENT(ds_xpu, m) {
    m.def("quantize_groups(Tensor x, int num_groups, int num_bits, bool symmetric) -> (Tensor, Tensor)");
    m.def("fake_quantize_groups(Tensor x, int num_groups, int num_bits, bool symmetric) -> Tensor");
    m.def("dequantize_groups(Tensor q, Tensor params, int group_size, int num_bits, ScalarType dtype) -> Tensor");
    m.def(
        "dequantize_reduce(Tensor q, Tensor params, int group_size, int num_bits, bool mean, ScalarType dtype) "
        "-> Tensor");
}

// Of every device, so that a tensor of another one is refused by name.
STABLE_TORCH_LIBRARY_IMPL(ds_xpu, CompositeExplicitAutograd, m) {
    m.impl("quantize_groups", TORCH_BOX(&ds_xpu::quantize_groups));
    m.impl("fake_quantize_groups", TORCH_BOX(&ds_xpu::fake_quantize_groups));
    m.impl("dequantize_groups", TORCH_BOX(&ds_xpu::dequantize_groups));
    m.impl("dequantize_reduce", TORCH_BOX(&ds_xpu::dequantize_reduce));
}
