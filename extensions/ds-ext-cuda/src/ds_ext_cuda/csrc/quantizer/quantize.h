// Kernels that quantize groups. One read of memory where a group fits the registers of some lanes, or of a block; a
// longer group is measured in pieces first, and read again.
#pragma once

#include "quantizer/levels.h"

namespace ds {

constexpr int kQuantizeThreads = 256;
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

// What one thread holds of a group: N elements from `begin` on, as many of them as the group has.
template <typename T, bool kAligned>
struct Unit {
    static constexpr int N = kWide<T>;
    Pack<float, N> at;
    int64_t begin;
    int count;  // 0: beyond the group

    __device__ __forceinline__ void load(const GroupArgs& args, int64_t group, int64_t from) {
        begin = from;
        const int64_t left = args.group_size - from;
        count = group >= args.num_groups || left <= 0 ? 0 : (left < N ? static_cast<int>(left) : N);
        if (count == 0) return;
        const T* x = static_cast<const T*>(args.x) + group * args.group_size + from;
        if constexpr (kAligned) {
            at = widen(read<N>(x));
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) at.at[i] = i < count ? widen(x[i]) : 0.0f;
        }
    }

    __device__ __forceinline__ void measure(Range& range) const {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (i < count) include(range, at.at[i]);
        }
    }

    // `to`: the number of the group in the result.
    __device__ __forceinline__ void store(const GroupArgs& args, int64_t group, int64_t to,
                                          const Scheme& scheme) const {
        if (count == 0) return;
        if (args.q == nullptr) {
            store_fake(static_cast<T*>(args.out) + group * args.group_size + begin, scheme);
        } else if (args.num_bits == 8) {
            store_int8(args.q + to * args.group_size + begin, scheme);
        } else {
            store_int4(reinterpret_cast<uint8_t*>(args.q) + to * ((args.group_size + 1) / 2) + begin / 2, scheme);
        }
    }

    __device__ __forceinline__ void store_fake(T* out, const Scheme& scheme) const {
        Pack<float, N> fake;
#pragma unroll
        for (int i = 0; i < N; ++i) fake.at[i] = number_of(level_of(at.at[i], scheme), scheme.scale, scheme.offset);
        put<N>(out, narrow<T>(fake), count);
    }

    __device__ __forceinline__ void store_int8(int8_t* q, const Scheme& scheme) const {
        Pack<int8_t, N> integers;
#pragma unroll
        for (int i = 0; i < N; ++i) integers.at[i] = integer_of(at.at[i], scheme);
        put<N>(q, integers, count);
    }

    __device__ __forceinline__ void store_int4(uint8_t* q, const Scheme& scheme) const {
        Pack<uint8_t, N / 2> bytes;
#pragma unroll
        for (int i = 0; i < N; i += 2) {  // of an odd count the last high nibble is 0
            const int8_t high = i + 1 < count ? integer_of(at.at[i + 1], scheme) : int8_t{0};
            bytes.at[i / 2] = packed(integer_of(at.at[i], scheme), high);
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

// A group to `args.lanes` neighbours of a warp.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kQuantizeThreads) quantize_by_lanes(GroupArgs args) {
    const int lanes = args.lanes, lane = threadIdx.x % lanes;
    const int64_t group = static_cast<int64_t>(blockIdx.x) * (kQuantizeThreads / lanes) + threadIdx.x / lanes;
    Unit<T, kAligned> units[kUnitsOfLane];
    Range range;
#pragma unroll
    for (int i = 0; i < kUnitsOfLane; ++i) {
        units[i].load(args, group, static_cast<int64_t>(i * lanes + lane) * kWide<T>);
        units[i].measure(range);
    }
    const Scheme scheme = scheme_of(joined_by_lanes(range, lanes), args.num_bits, args.symmetric);
    if (group >= args.num_groups) return;
    const int64_t to = place_of(args, group);
    if (lane == 0) store_params(args, to, scheme);
#pragma unroll
    for (int i = 0; i < kUnitsOfLane; ++i) units[i].store(args, group, to, scheme);
}

template <typename T, bool kAligned>
__device__ __forceinline__ void load_piece(const GroupArgs& args, int64_t group, int64_t begin,
                                           Unit<T, kAligned> (&units)[kUnitsOfThread]) {
#pragma unroll
    for (int i = 0; i < kUnitsOfThread; ++i) {
        units[i].load(args, group, begin + static_cast<int64_t>(i * kQuantizeThreads + threadIdx.x) * kWide<T>);
    }
}

template <typename T, bool kAligned>
__device__ __forceinline__ Range range_of(const Unit<T, kAligned> (&units)[kUnitsOfThread]) {
    Range range;
#pragma unroll
    for (int i = 0; i < kUnitsOfThread; ++i) units[i].measure(range);
    return joined_by_block(range);
}

// A group to a block.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kQuantizeThreads) quantize_by_block(GroupArgs args) {
    const int64_t group = blockIdx.x, to = place_of(args, group);
    Unit<T, kAligned> units[kUnitsOfThread];
    load_piece(args, group, 0, units);
    const Scheme scheme = scheme_of(range_of(units), args.num_bits, args.symmetric);
    if (threadIdx.x == 0) store_params(args, to, scheme);
#pragma unroll
    for (int i = 0; i < kUnitsOfThread; ++i) units[i].store(args, group, to, scheme);
}

// Elements of a group that a block holds.
template <typename T>
constexpr int64_t kPiece = static_cast<int64_t>(kQuantizeThreads) * kUnitsOfThread * kWide<T>;

// A long group, first of three: the range of each piece.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kQuantizeThreads) measure_pieces(GroupArgs args) {
    Unit<T, kAligned> units[kUnitsOfThread];
    load_piece(args, blockIdx.x / args.pieces, blockIdx.x % args.pieces * kPiece<T>, units);
    const Range range = range_of(units);
    if (threadIdx.x == 0) args.ranges[blockIdx.x] = range;
}

// Second: the range of each group, and its params.
static __global__ void __launch_bounds__(kQuantizeThreads) join_pieces(GroupArgs args) {
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
__global__ void __launch_bounds__(kQuantizeThreads) convert_pieces(GroupArgs args) {
    const int64_t group = blockIdx.x / args.pieces, to = place_of(args, group);
    const Scheme scheme = scheme_of(args.of_group[group], args.num_bits, args.symmetric);
    Unit<T, kAligned> units[kUnitsOfThread];
    load_piece(args, group, blockIdx.x % args.pieces * kPiece<T>, units);
#pragma unroll
    for (int i = 0; i < kUnitsOfThread; ++i) units[i].store(args, group, to, scheme);
}

}  // namespace ds
