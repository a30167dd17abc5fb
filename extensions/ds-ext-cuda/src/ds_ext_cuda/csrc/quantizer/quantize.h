// Kernels that quantize groups. One read of memory where a group fits the registers of some lanes, or of a block; a
// longer group is measured in pieces first, and read again.
#pragma once

#include "quantizer/levels.h"

namespace ds {

constexpr int kQuantizeThreads = 256;
// At least so many share a multiprocessor.
constexpr int kBlocksPerProcessor = 3;
// Wide accesses that a thread keeps in registers.
constexpr int kUnitsOfLane = 4, kUnitsOfThread = 8;

struct GroupArgs {
    int64_t num_groups;
    int64_t group_size;
    int32_t num_bits;
    bool symmetric;
    int32_t num_nodes;         // groups are written in another order where this and the next are more than 1
    int32_t devices_per_node;  //
    int32_t lanes;             // of a group, where several share a warp
    int64_t pieces;            // of a group, where it is longer than a block holds
    const void* x;
    int8_t* q;        // int8, or packed int4; null: fake quantization
    void* out;        // numbers, where q is null
    float* params;    // per group: scale, and offset when asymmetric; null: not wanted
    Range* ranges;    // per piece, where a group has several
    Range* of_group;  // and of all of them
};

// What one thread holds of a group, by one wide access: N elements from `begin` on, as many of them as the group has.
// Kept as they are stored, so that more threads fit beside each other.
template <typename T, bool kAligned>
struct Unit {
    static constexpr int N = kWide<T>;
    Pack<T, N> at;

    static __device__ __forceinline__ int count_of(int64_t size, int64_t begin) {
        const int64_t left = size - begin;
        return left <= 0 ? 0 : (kAligned || left >= N ? N : static_cast<int>(left));
    }

    __device__ __forceinline__ void load(const T* group, int64_t size, int64_t begin) {
        const int count = count_of(size, begin);
        if (count == 0) return;
        if constexpr (kAligned) {
            at = read<N>(group + begin);
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if (i < count) at.at[i] = group[begin + i];
            }
        }
    }

    __device__ __forceinline__ void measure(int64_t size, int64_t begin, Range& range) {
        const int count = count_of(size, begin);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (i < count) include(range, widen(at.at[i]));
        }
    }

    // `to`: the number of the group in the result.
    __device__ __forceinline__ void store(const GroupArgs& args, int64_t group, int64_t to, int64_t begin,
                                          const Scheme& scheme) const {
        const int count = count_of(args.group_size, begin);
        if (count == 0) return;
        if (args.q == nullptr) {
            store_fake(static_cast<T*>(args.out) + group * args.group_size + begin, count, scheme);
        } else if (args.num_bits == 8) {
            store_int8(args.q + to * args.group_size + begin, count, scheme);
        } else {
            uint8_t* q = reinterpret_cast<uint8_t*>(args.q) + to * ((args.group_size + 1) / 2);
            store_int4(q + begin / 2, count, scheme);
        }
    }

    __device__ __forceinline__ void store_fake(T* out, int count, const Scheme& scheme) const {
        Pack<T, N> fake;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (i < count) {
                fake.at[i] = narrow<T>(number_of(level_of(widen(at.at[i]), scheme), scheme.scale, scheme.offset));
            }
        }
        put<N>(out, fake, count);
    }

    __device__ __forceinline__ void store_int8(int8_t* q, int count, const Scheme& scheme) const {
        Pack<int8_t, N> integers;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (i < count) integers.at[i] = integer_of(widen(at.at[i]), scheme);
        }
        put<N>(q, integers, count);
    }

    __device__ __forceinline__ void store_int4(uint8_t* q, int count, const Scheme& scheme) const {
        Pack<uint8_t, N / 2> bytes;
#pragma unroll
        for (int i = 0; i < N; i += 2) {  // of an odd count the last high nibble is 0
            const int8_t low = i < count ? integer_of(widen(at.at[i]), scheme) : int8_t{0};
            const int8_t high = i + 1 < count ? integer_of(widen(at.at[i + 1]), scheme) : int8_t{0};
            bytes.at[i / 2] = packed(low, high);
        }
        put<N / 2>(q, bytes, (count + 1) / 2);
    }

    template <int kCount, typename V>
    static __device__ __forceinline__ void put(V* to, const Pack<V, kCount>& pack, int count) {
        if constexpr (kAligned) {
            write(to, pack);
        } else {
#pragma unroll
            for (int i = 0; i < kCount; ++i) {
                if (i < count) to[i] = pack.at[i];
            }
        }
    }
};

// Groups counted as (node, device, rest) are written as (device, node, rest); of one node and device, as they are.
__device__ __forceinline__ int64_t place_of(const GroupArgs& args, int64_t group) {
    const int64_t parts = static_cast<int64_t>(args.num_nodes) * args.devices_per_node;
    if (parts == 1) return group;
    const int64_t rest = args.num_groups / parts, part = group / rest;
    const int64_t node = part / args.devices_per_node, device = part % args.devices_per_node;
    return (device * args.num_nodes + node) * rest + group % rest;
}

__device__ __forceinline__ void store_params(const GroupArgs& args, int64_t to, const Scheme& scheme) {
    if (args.params == nullptr) return;
    if (args.symmetric) {
        args.params[to] = scheme.scale;
    } else {
        args.params[2 * to] = scheme.scale;
        args.params[2 * to + 1] = scheme.offset;
    }
}

// Where the number-th wide access of a group begins.
template <typename T>
__device__ __forceinline__ int64_t begin_of(int number) {
    return static_cast<int64_t>(number) * kWide<T>;
}

template <typename T>
__device__ __forceinline__ const T* start_of(const GroupArgs& args, int64_t group) {
    return static_cast<const T*>(args.x) + group * args.group_size;
}

// A group to `args.lanes` neighbours of a warp.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kQuantizeThreads, kBlocksPerProcessor) quantize_by_lanes(GroupArgs args) {
    const int lanes = args.lanes, lane = threadIdx.x % lanes;
    const int64_t group = static_cast<int64_t>(blockIdx.x) * (kQuantizeThreads / lanes) + threadIdx.x / lanes;
    const int64_t size = group < args.num_groups ? args.group_size : 0;
    Unit<T, kAligned> units[kUnitsOfLane];
    Range range;
#pragma unroll
    for (int i = 0; i < kUnitsOfLane; ++i) units[i].load(start_of<T>(args, group), size, begin_of<T>(i * lanes + lane));
#pragma unroll
    for (int i = 0; i < kUnitsOfLane; ++i) units[i].measure(size, begin_of<T>(i * lanes + lane), range);
    const Scheme scheme = scheme_of(joined_by_lanes(range, lanes), args.num_bits, args.symmetric);
    if (group >= args.num_groups) return;
    const int64_t to = place_of(args, group);
    if (lane == 0) store_params(args, to, scheme);
#pragma unroll
    for (int i = 0; i < kUnitsOfLane; ++i) units[i].store(args, group, to, begin_of<T>(i * lanes + lane), scheme);
}

// What a block holds of a group, from `begin` on. Every thread of the block calls.
template <typename T, bool kAligned>
struct Piece {
    Unit<T, kAligned> units[kUnitsOfThread];

    static __device__ __forceinline__ int64_t at(int64_t begin, int unit) {
        return begin + begin_of<T>(unit * kQuantizeThreads + threadIdx.x);
    }

    __device__ __forceinline__ void load(const GroupArgs& args, int64_t group, int64_t begin) {
#pragma unroll
        for (int i = 0; i < kUnitsOfThread; ++i) units[i].load(start_of<T>(args, group), args.group_size, at(begin, i));
    }

    __device__ __forceinline__ Range range(const GroupArgs& args, int64_t begin) {
        Range range;
#pragma unroll
        for (int i = 0; i < kUnitsOfThread; ++i) units[i].measure(args.group_size, at(begin, i), range);
        return joined_by_block(range);
    }

    __device__ __forceinline__ void store(const GroupArgs& args, int64_t group, int64_t to, int64_t begin,
                                          const Scheme& scheme) const {
#pragma unroll
        for (int i = 0; i < kUnitsOfThread; ++i) units[i].store(args, group, to, at(begin, i), scheme);
    }
};

// A group to a block.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kQuantizeThreads, kBlocksPerProcessor) quantize_by_block(GroupArgs args) {
    const int64_t group = blockIdx.x, to = place_of(args, group);
    Piece<T, kAligned> piece;
    piece.load(args, group, 0);
    const Scheme scheme = scheme_of(piece.range(args, 0), args.num_bits, args.symmetric);
    if (threadIdx.x == 0) store_params(args, to, scheme);
    piece.store(args, group, to, 0, scheme);
}

// Elements of a group that a block holds.
template <typename T>
constexpr int64_t kPiece = static_cast<int64_t>(kQuantizeThreads) * kUnitsOfThread * kWide<T>;

// A long group, first of three: the range of each piece.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kQuantizeThreads, kBlocksPerProcessor) measure_pieces(GroupArgs args) {
    const int64_t begin = blockIdx.x % args.pieces * kPiece<T>;
    Piece<T, kAligned> piece;
    piece.load(args, blockIdx.x / args.pieces, begin);
    const Range range = piece.range(args, begin);
    if (threadIdx.x == 0) args.ranges[blockIdx.x] = range;
}

// Second: the range of each group, and its params.
static __global__ void __launch_bounds__(kQuantizeThreads, kBlocksPerProcessor) join_pieces(GroupArgs args) {
    const int64_t group = blockIdx.x;
    Range range;
    for (int64_t i = threadIdx.x; i < args.pieces; i += kQuantizeThreads) {
        range = joined(range, args.ranges[group * args.pieces + i]);
    }
    range = joined_by_block(range);
    if (threadIdx.x != 0) return;
    args.of_group[group] = range;
    store_params(args, place_of(args, group), scheme_of(range, args.num_bits, args.symmetric));
}

// Third.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kQuantizeThreads, kBlocksPerProcessor) convert_pieces(GroupArgs args) {
    const int64_t group = blockIdx.x / args.pieces, begin = blockIdx.x % args.pieces * kPiece<T>;
    const Scheme scheme = scheme_of(args.of_group[group], args.num_bits, args.symmetric);
    Piece<T, kAligned> piece;
    piece.load(args, group, begin);
    piece.store(args, group, place_of(args, group), begin, scheme);
}

}  // namespace ds
