// Quantization by group, a piece of a group by a work-group, and back. Formulas and layout:
// deepspeed/ops/quantizer/groups.py. The results are those of the torch reference, bit for bit, where the device
// divides in fp32 as IEEE 754 says.
#pragma once

#include "common/kernel.h"
#include "quantizer/quantizer_args.h"

namespace ds_xpu {

// Smallest and largest of some numbers; both NaN where one of them is.
struct Range {
    float low;
    float high;
};

// Of `count` elements, each a pair of bounds; every work-item of the group asks together, and gets the same.
template <typename LowAt, typename HighAt>
inline Range range_of(const sycl::nd_item<1>& here, int64_t count, const LowAt& low_at, const HighAt& high_at) {
    const sycl::group<1> group = here.get_group();
    const int64_t stride = static_cast<int64_t>(here.get_local_range(0));
    float low = sycl::bit_cast<float>(0x7F800000u), high = -low;
    bool has_nan = false;
    for (int64_t i = static_cast<int64_t>(here.get_local_id(0)); i < count; i += stride) {
        const float a = low_at(i), b = high_at(i);
        has_nan = has_nan || is_nan(a) || is_nan(b);
        low = a < low ? a : low;
        high = b > high ? b : high;
    }
    low = sycl::reduce_over_group(group, low, sycl::minimum<float>());
    high = sycl::reduce_over_group(group, high, sycl::maximum<float>());
    const float nan = sycl::bit_cast<float>(0x7FC00000u);
    return sycl::any_of_group(group, has_nan) ? Range{nan, nan} : Range{low, high};
}

// One work-group's part of the work: elements [begin, end) of a group whose first element is number `start` of x.
struct Piece {
    int64_t group;
    int64_t number;  // within the group
    int64_t start;
    int64_t begin;
    int64_t end;
};

inline Piece piece_of(const QuantizeArgs& args, const sycl::nd_item<1>& here) {
    const int64_t index = static_cast<int64_t>(here.get_group(0)), group = divide(index, args.num_pieces);
    const int64_t number = index - group * args.num_pieces, begin = number * kPiece;
    return {group, number, group * args.group_size, begin, sycl::min(begin + kPiece, args.group_size)};
}

inline Range range_of_piece(const QuantizeArgs& args, const sycl::nd_item<1>& here, const Piece& piece) {
    const auto x_at = [&](int64_t i) { return load(args.x, piece.start + piece.begin + i); };
    return range_of(here, piece.end - piece.begin, x_at, x_at);
}

// The range of each piece, where groups have several.
DS_XPU_KERNEL void measure_kernel(QuantizeArgs args) {
    const sycl::nd_item<1> here = this_item();
    const Range range = range_of_piece(args, here, piece_of(args, here));
    float* to = args.ranges + 2 * static_cast<int64_t>(here.get_group(0));
    if (here.get_local_id(0) == 0) {
        to[0] = range.low;
        to[1] = range.high;
    }
}

// Where the numbers of a group go.
struct Grid {
    float shift;
    float inverse;
    float scale;
    float offset;
};

inline Grid grid_of(const QuantizeArgs& args, const sycl::nd_item<1>& here, const Piece& piece) {
    constexpr float kTiny = 0x1.0p-126f;  // the smallest normal number
    Range range{0.0f, 0.0f};
    if (args.ranges != nullptr) {
        const float* ranges = args.ranges + 2 * piece.group * args.num_pieces;
        range = range_of(
            here, args.num_pieces, [&](int64_t i) { return ranges[2 * i]; },
            [&](int64_t i) { return ranges[2 * i + 1]; });
    } else if (args.group_size > 0) {
        range = range_of_piece(args, here, piece);
    }
    const float width = args.symmetric ? (-range.low > range.high ? -range.low : range.high) : range.high - range.low;
    float scale = width * args.per_level;
    scale = scale < kTiny ? kTiny : scale;  // NaN stays
    if (args.symmetric) return {0.0f, 1.0f / scale, scale, 0.0f};
    return {range.low, 1.0f / scale, scale, range.low + args.back * scale};
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

// The byte of q that holds element i, and its neighbour where two share a byte.
inline int8_t byte_of(const QuantizeArgs& args, const Grid& grid, int64_t start, int64_t i) {
    const int32_t low = integer_of(level_of(args, grid, load(args.x, start + i)));
    if (!args.packed) return static_cast<int8_t>(low);
    const bool has_high = i + 1 < args.group_size;
    const int32_t high = has_high ? integer_of(level_of(args, grid, load(args.x, start + i + 1))) : 0;
    return static_cast<int8_t>((low & 15) | static_cast<int32_t>(static_cast<uint32_t>(high) << 4));
}

// Int8, packed int4, or the numbers that they stand for.
DS_XPU_KERNEL void quantize_kernel(QuantizeArgs args) {
    const sycl::nd_item<1> here = this_item();
    const int64_t first = static_cast<int64_t>(here.get_local_id(0)), stride = here.get_local_range(0);
    const Piece piece = piece_of(args, here);
    const Grid grid = grid_of(args, here, piece);
    if (args.q == nullptr) {
        for (int64_t i = piece.begin + first; i < piece.end; i += stride) {
            const float level = level_of(args, grid, load(args.x, piece.start + i));
            store(args.out, piece.start + i, number_of(level, grid.scale, !args.symmetric, grid.offset));
        }
        return;
    }
    int8_t* q = args.q + piece.group * args.group_bytes;
    const int64_t per_byte = args.packed ? 2 : 1;
    for (int64_t i = piece.begin + per_byte * first; i < piece.end; i += per_byte * stride) {
        q[i / per_byte] = byte_of(args, grid, piece.start, i);
    }
    if (first == 0 && piece.number == 0) {
        float* params = args.params + piece.group * (args.symmetric ? 1 : 2);
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
