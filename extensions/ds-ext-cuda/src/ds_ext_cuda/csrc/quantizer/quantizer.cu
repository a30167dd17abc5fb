// Quantization by group for tensors in GPU memory: `ds_cuda::quantize_groups`, `swizzled_quantize_groups`,
// `fake_quantize_groups`, `dequantize_groups`, `dequantize_reduce`. Formulas and layout:
// deepspeed/ops/quantizer/groups.py.

#include <algorithm>
#include <tuple>

#include "common/tensors.h"
#include "quantizer/dequantize.h"
#include "quantizer/quantize.h"

namespace ds {

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

// Lanes of a warp for a group of so many wide accesses: two for each lane, as long as there are lanes.
static int lanes_for(int64_t units) {
    int lanes = 1;
    while (lanes < kWarpSize && units > 2 * lanes) lanes *= 2;
    return lanes;
}

// Threads of a block for a group of so many: half of what they can hold, so that several reads of each are under way.
static int threads_for(int64_t units) {
    const int64_t warps = divide_up(units, kUnitsOfThread / 2 * kWarpSize);
    return static_cast<int>(std::min<int64_t>(warps * kWarpSize, kQuantizeThreads));
}

template <typename T, bool kAligned>
static void run_groups(const char* op, const Tensor& x, GroupArgs args) {
    const OnDevice device(x);
    const int64_t units = divide_up(args.group_size, kWide<T>);
    const Argument argument{op, "x"};
    if (units <= kUnitsOfLane * kWarpSize) {
        args.lanes = lanes_for(units);
        const int64_t blocks = divide_up(args.num_groups, kQuantizeThreads / args.lanes);
        launch(quantize_by_lanes<T, kAligned>, grid_of(argument, blocks), kQuantizeThreads, device.stream(), args);
        return;
    }
    if (args.group_size <= kPiece<T>) {
        launch(quantize_by_block<T, kAligned>, grid_of(argument, args.num_groups), threads_for(units), device.stream(),
               args);
        return;
    }
    args.pieces = divide_up(args.group_size, kPiece<T>);
    const int64_t blocks = args.num_groups * args.pieces;
    const Tensor ranges = new_tensor(x, {blocks + args.num_groups, 2}, ScalarType::Int);
    args.ranges = static_cast<Range*>(ranges.data_ptr());
    args.of_group = args.ranges + blocks;
    launch(measure_pieces<T, kAligned>, grid_of(argument, blocks), kQuantizeThreads, device.stream(), args);
    launch(join_pieces, grid_of(argument, args.num_groups), kQuantizeThreads, device.stream(), args);
    launch(convert_pieces<T, kAligned>, grid_of(argument, blocks), kQuantizeThreads, device.stream(), args);
}

static void run_groups(const char* op, Dtype dtype, const Tensor& x, const GroupArgs& args) {
    by_dtype(dtype, [&](auto one) {
        using T = decltype(one);
        if (is_aligned<kWide<T>>(static_cast<const T*>(args.x), args.group_size)) {
            run_groups<T, true>(op, x, args);
        } else {
            run_groups<T, false>(op, x, args);
        }
    });
}

static std::tuple<Tensor, Tensor> quantized(const char* op, const Tensor& x, int64_t num_groups, int64_t num_bits,
                                            bool symmetric, int64_t num_nodes, int64_t devices_per_node) {
    const Dtype dtype = check_float_on_device({op, "x"}, x);
    check_num_groups(op, x, num_groups);
    check_packed_bits(op, num_bits);
    const int64_t group_size = x.numel() / num_groups;
    const Tensor flat = as_contiguous(x);
    const Tensor q = new_tensor(x, {num_groups, (group_size * num_bits + 7) / 8}, ScalarType::Char);
    const Tensor params = new_tensor(x, {num_groups, symmetric ? 1 : 2}, ScalarType::Float);
    run_groups(op, dtype, x,
               {.num_groups = num_groups,
                .group_size = group_size,
                .num_bits = static_cast<int32_t>(num_bits),
                .symmetric = symmetric,
                .num_nodes = static_cast<int32_t>(num_nodes),
                .devices_per_node = static_cast<int32_t>(devices_per_node),
                .x = flat.data_ptr(),
                // never null: an empty tensor has no memory
                .q = static_cast<int8_t*>(group_size == 0 ? params.data_ptr() : q.data_ptr()),
                .params = static_cast<float*>(params.data_ptr())});
    return {q, params};
}

static std::tuple<Tensor, Tensor> quantize_groups(Tensor x, int64_t num_groups, int64_t num_bits, bool symmetric) {
    return quantized("quantize_groups", x, num_groups, num_bits, symmetric, 1, 1);
}

// As `quantize_groups`, with the groups of x, counted as (node, device, rest), in the order (device, node, rest): then
// a first all-to-all within each node and a second one between nodes find their shares side by side (ZeRO++,
// arXiv 2306.10209, section 3.3).
static std::tuple<Tensor, Tensor> swizzled_quantize_groups(Tensor x, int64_t num_groups, int64_t num_bits,
                                                           bool symmetric, int64_t num_nodes,
                                                           int64_t devices_per_node) {
    const char* op = "swizzled_quantize_groups";
    if (num_nodes < 1 || num_nodes > 65535) refuse({op, "num_nodes"}, std::to_string(num_nodes), "1 to 65535");
    if (devices_per_node < 1 || devices_per_node > 65535 || num_groups % (num_nodes * devices_per_node) != 0) {
        refuse({op, "devices_per_node"}, std::to_string(devices_per_node),
               "such that " + std::to_string(num_nodes) + " nodes of so many devices divide the " +
                   std::to_string(num_groups) + " groups");
    }
    return quantized(op, x, num_groups, num_bits, symmetric, num_nodes, devices_per_node);
}

static Tensor fake_quantize_groups(Tensor x, int64_t num_groups, int64_t num_bits, bool symmetric) {
    const char* op = "fake_quantize_groups";
    const Dtype dtype = check_float_on_device({op, "x"}, x);
    check_num_groups(op, x, num_groups);
    if (num_bits < 2 || num_bits > 16) refuse({op, "num_bits"}, std::to_string(num_bits), "2 to 16");
    const Tensor flat = as_contiguous(x), out = new_tensor(x, sizes_of(x));
    if (x.numel() == 0) return out;
    run_groups(op, dtype, x,
               {.num_groups = num_groups,
                .group_size = x.numel() / num_groups,
                .num_bits = static_cast<int32_t>(num_bits),
                .symmetric = symmetric,
                .num_nodes = 1,
                .devices_per_node = 1,
                .x = flat.data_ptr(),
                .out = out.data_ptr()});
    return out;
}

static Dtype dtype_of(const char* op, ScalarType dtype) {
    if (dtype == ScalarType::Float) return Dtype::kFp32;
    if (dtype == ScalarType::BFloat16) return Dtype::kBf16;
    if (dtype == ScalarType::Half) return Dtype::kFp16;
    refuse({op, "dtype"}, "another dtype", "float32, bfloat16 or float16");
}

// q (..., G, bytes) and params (..., G, 1 or 2) fit each other, and the group size.
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

template <typename T, int N, int kBits>
static void launch_numbers(const char* op, const Tensor& q, NumberArgs args) {
    const OnDevice device(q);
    const int64_t step = int64_t{kDequantizeThreads} * N, size = std::max<int64_t>(args.group_size, 1);
    args.step_groups = step / size;
    args.step_begin = step % size;
    launch(dequantize<T, N, kBits>, grid_of({op, "q"}, divide_up(args.numel, step * kDequantizeUnits<N>)),
           kDequantizeThreads, device.stream(), args);
}

template <typename T, int kBits>
static void run_numbers(const char* op, const Tensor& q, const NumberArgs& args) {
    if (is_aligned<kDequantizeWidth<T, kBits>>(args.q, args.group_size)) {
        launch_numbers<T, kDequantizeWidth<T, kBits>, kBits>(op, q, args);
    } else if (is_aligned<kWide<T>>(args.q, args.group_size)) {
        launch_numbers<T, kWide<T>, kBits>(op, q, args);
    } else {
        launch_numbers<T, 1, kBits>(op, q, args);
    }
}

// (G, S) numbers of `dtype`: the copies added up.
static Tensor numbers(const char* op, const Tensor& q, const Tensor& params, int64_t num_dims, int64_t group_size,
                      int64_t num_bits, bool mean, ScalarType dtype) {
    check_quantized(op, q, params, num_dims, group_size, num_bits);
    const Dtype kind = dtype_of(op, dtype);
    const Tensor integers = as_contiguous(q), scales = as_contiguous(params);
    const int64_t num_groups = q.size(num_dims - 2), num_copies = num_dims == 3 ? q.size(0) : 1;
    const Tensor out = new_tensor(q, {num_groups, group_size}, dtype);
    const NumberArgs args{
        .numel = out.numel(),
        .group_size = group_size,
        .group_bytes = q.size(num_dims - 1),
        .num_groups = num_groups,
        .num_copies = num_copies,
        .num_params = static_cast<int32_t>(params.size(num_dims - 1)),
        .factor = mean && num_copies > 0 ? static_cast<float>(1.0 / static_cast<double>(num_copies)) : 1.0f,
        .q = static_cast<const int8_t*>(integers.data_ptr()),
        .params = static_cast<const float*>(scales.data_ptr()),
        .out = out.data_ptr()};
    by_dtype(kind, [&](auto one) {
        using T = decltype(one);
        num_bits == 8 ? run_numbers<T, 8>(op, q, args) : run_numbers<T, 4>(op, q, args);
    });
    return out;
}

static Tensor dequantize_groups(Tensor q, Tensor params, int64_t group_size, int64_t num_bits, ScalarType dtype) {
    return numbers("dequantize_groups", q, params, 2, group_size, num_bits, false, dtype);
}

static Tensor dequantize_reduce(Tensor q, Tensor params, int64_t group_size, int64_t num_bits, bool mean,
                                ScalarType dtype) {
    return numbers("dequantize_reduce", q, params, 3, group_size, num_bits, mean, dtype);
}

}  // namespace ds

STABLE_TORCH_LIBRARY_FRAGMENT(ds_cuda, m) {
    m.def("quantize_groups(Tensor x, int num_groups, int num_bits, bool symmetric) -> (Tensor, Tensor)");
    m.def(
        "swizzled_quantize_groups(Tensor x, int num_groups, int num_bits, bool symmetric, int num_nodes, "
        "int devices_per_node) -> (Tensor, Tensor)");
    m.def("fake_quantize_groups(Tensor x, int num_groups, int num_bits, bool symmetric) -> Tensor");
    m.def("dequantize_groups(Tensor q, Tensor params, int group_size, int num_bits, ScalarType dtype) -> Tensor");
    m.def(
        "dequantize_reduce(Tensor q, Tensor params, int group_size, int num_bits, bool mean, ScalarType dtype) "
        "-> Tensor");
}

DS_CUDA_LIBRARY_IMPL(m) {
    m.impl("quantize_groups", TORCH_BOX(&ds::quantize_groups));
    m.impl("swizzled_quantize_groups", TORCH_BOX(&ds::swizzled_quantize_groups));
    m.impl("fake_quantize_groups", TORCH_BOX(&ds::fake_quantize_groups));
    m.impl("dequantize_groups", TORCH_BOX(&ds::dequantize_groups));
    m.impl("dequantize_reduce", TORCH_BOX(&ds::dequantize_reduce));
}
