// Quantization by group, a group by a work-group, and back. Formulas and layout: deepspeed/ops/quantizer/groups.py.
// The results are those of the torch reference, bit for bit, where the device divides in fp32 as IEEE 754 says.
#pragma once

#include "common/kernel.h"
#include "quantizer/quantizer_args.h"

namespace ds_xpu {

struct Grid {
    float shift;
    float inverse;
    float scale;
    float offset;
};

// The grid of one group; every work-item of the group asks together. NaN and infinity in the group make it NaN.
inline Grid grid_of(const sycl::group<1>& group, const QuantizeArgs& args, int64_t start, int64_t first,
                    int64_t stride) {
    constexpr float kTiny = 0x1.0p-126f;  // the smallest normal number
    float low = sycl::bit_cast<float>(0x7F800000u), high = -low;
    bool has_nan = false;
    for (int64_t i = first; i < args.group_size; i += stride) {
        const float x = load(args.x, start + i);
        has_nan = has_nan || is_nan(x);
        low = x < low ? x : low;
        high = x > high ? x : high;
    }
    low = sycl::reduce_over_group(group, low, sycl::minimum<float>());
    high = sycl::reduce_over_group(group, high, sycl::maximum<float>());
    has_nan = sycl::any_of_group(group, has_nan);
    if (args.group_size == 0) low = high = 0.0f;
    if (has_nan) low = high = sycl::bit_cast<float>(0x7FC00000u);
    const float range = args.symmetric ? (-low > high ? -low : high) : high - low;
    float scale = range * args.per_level;
    scale = scale < kTiny ? kTiny : scale;  // NaN stays
    if (args.symmetric) return {0.0f, 1.0f / scale, scale, 0.0f};
    return {low, 1.0f / scale, scale, low + args.back * scale};
}

// NaN stays NaN: neither bound is beyond it.
inline float level_of(const QuantizeArgs& args, const Grid& grid, float x) {
    const float level = sycl::rint((x - grid.shift) * grid.inverse);
    const float clamped = level < args.bottom ? args.bottom : level > args.top ? args.top : level;
    return clamped - args.back;
}

inline int32_t integer_of(float level) { return is_nan(level) ? 0 : static_cast<int32_t>(level); }

inline float number_of(float level, float scale, bool has_offset, float offset) {
    const float number = level * scale;
    return has_offset ? number + offset : number;
}

// One work-group for each group: int8, packed int4, or the numbers that they stand for.
DS_XPU_KERNEL void quantize_kernel(QuantizeArgs args) {
    const sycl::nd_item<1> here = this_item();
    const int64_t first = static_cast<int64_t>(here.get_local_id(0)), stride = here.get_local_range(0);
    const int64_t number = static_cast<int64_t>(here.get_group(0)), start = number * args.group_size;
    const Grid grid = grid_of(here.get_group(), args, start, first, stride);
    if (args.q == nullptr) {
        for (int64_t i = first; i < args.group_size; i += stride) {
            const float level = level_of(args, grid, load(args.x, start + i));
            store(args.out, start + i, number_of(level, grid.scale, !args.symmetric, grid.offset));
        }
        return;
    }
    int8_t* q = args.q + number * args.group_bytes;
    for (int64_t byte = first; byte < args.group_bytes; byte += stride) {
        const int64_t i = args.packed ? 2 * byte : byte;
        int32_t bits = integer_of(level_of(args, grid, load(args.x, start + i)));
        if (args.packed) {
            const bool has_second = i + 1 < args.group_size;
            const int32_t high = has_second ? integer_of(level_of(args, grid, load(args.x, start + i + 1))) : 0;
            bits = (bits & 15) | static_cast<int32_t>(static_cast<uint32_t>(high) << 4);
        }
        q[byte] = static_cast<int8_t>(bits);
    }
    if (first == 0) {
        float* params = args.params + number * (args.symmetric ? 1 : 2);
        params[0] = grid.scale;
        if (!args.symmetric) params[1] = grid.offset;
    }
}

// The level of element `i` of a group whose bytes begin at `q`.
inline float stored_level(const int8_t* q, int64_t i, bool packed) {
    if (!packed) return static_cast<float>(q[i]);
    const int32_t byte = q[i / 2];
    const int32_t nibble = (i % 2 == 0 ? byte : byte >> 4) & 15;
    return static_cast<float>(nibble < 8 ? nibble : nibble - 16);
}

// An element of the result by a work-item, its copies added in order.
DS_XPU_KERNEL void dequantize_kernel(DequantizeArgs args) {
    const int64_t at = static_cast<int64_t>(this_item().get_global_id(0));
    if (at >= args.numel) return;
    const int64_t group = divide(at, args.group_size), i = at - group * args.group_size;
    float total = 0.0f;
    for (int64_t copy = 0; copy < args.num_copies; ++copy) {
        const int64_t index = copy * args.num_groups + group;
        const float* params = args.params + index * args.num_params;
        const bool has_offset = args.num_params == 2;
        const float level = stored_level(args.q + index * args.group_bytes, i, args.packed);
        const float number = number_of(level, params[0], has_offset, has_offset ? params[1] : 0.0f);
        total = args.num_copies == 1 ? number : total + number;
    }
    store(args.out, at, total * args.factor);
}

}  // namespace ds_xpu
