// Kernels that quantize groups. One read of memory where a group fits the registers of some lanes, or of a block; a
// longer group is measured in pieces first, and read again.
#pragma once

#include "quantizer/levels.h"

namespace ds {

constexpr int kQuantizeThreads = 256;
// At least so many share a multiprocessor; what is not aligned is kept in more registers.
template <bool kAligned>
constexpr int kBlocksPerProcessor = kAligned ? 4 : 2;
// Wide accesses that a thread keeps in registers.
constexpr int kUnitsOfLane = 8, kUnitsOfThread = 8;

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

// Where a part of a group is read, and written: its results begin there.
template <typename T>
struct Place {
    const T* x;
    int size;          // of the part; 0: there is none
    T* out = nullptr;  // this one for fake quantization, or that one
    int8_t* q = nullptr;

    __device__ __forceinline__ Place(const GroupArgs& args, int64_t group, int64_t to, int64_t begin, int most) {
        const int64_t left = group < args.num_groups ? args.group_size - begin : 0, start = group * args.group_size;
        size = left < most ? static_cast<int>(left) : most;
        x = static_cast<const T*>(args.x) + start + begin;
        if (args.q == nullptr) {
            out = static_cast<T*>(args.out) + start + begin;
        } else if (args.num_bits == 8) {
            q = args.q + to * args.group_size + begin;
        } else {
            q = args.q + to * ((args.group_size + 1) / 2) + begin / 2;
        }
    }
};

// What one thread holds of it, by one wide access: N elements from `begin` on, as many of them as there are. Kept as
// they are stored, so that more threads fit beside each other.
template <typename T, bool kAligned>
struct Unit {
    static constexpr int N = kWide<T>;
    Pack<T, N> at;

    static __device__ __forceinline__ int count_of(const Place<T>& place, int begin) {
        const int left = place.size - begin;
        return left <= 0 ? 0 : (kAligned || left >= N ? N : left);
    }

    __device__ __forceinline__ void load(const Place<T>& place, int begin) {
        const int count = count_of(place, begin);
        if (count == 0) return;
        if constexpr (kAligned) {
            at = read<N>(place.x + begin);
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if (i < count) at.at[i] = place.x[begin + i];
            }
        }
    }

    __device__ __forceinline__ void measure(const Place<T>& place, int begin, Range& range) const {
        const int count = count_of(place, begin);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (i < count) include(range, widen(at.at[i]));
        }
    }

    // Of a finite scheme.
    template <int kBits>
    __device__ __forceinline__ void store_integers(const Place<T>& place, int begin, const Scheme& scheme) const {
        const int count = count_of(place, begin);
        if (count == 0) return;
        if constexpr (kAligned) {
            write(reinterpret_cast<uint8_t*>(place.q) + begin * kBits / 8, integers_of<N, kBits>(widen(at), scheme));
        } else {
            store_any(kBits, place, begin, scheme);
        }
    }

    // Of any scheme.
    __device__ __forceinline__ void store_any(int num_bits, const Place<T>& place, int begin,
                                              const Scheme& scheme) const {
        const int count = count_of(place, begin);
        if (count == 0) return;
        if (num_bits == 8) {
            store_int8(place.q + begin, count, scheme);
        } else {
            store_int4(reinterpret_cast<uint8_t*>(place.q) + begin / 2, count, scheme);
        }
    }

    __device__ __forceinline__ void store_fake(const Place<T>& place, int begin, const Scheme& scheme) const {
        const int count = count_of(place, begin);
        if (count == 0) return;
        Pack<float, N> fake = widen(at);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            fake.at[i] = number_of(level_of(fake.at[i], scheme), scheme.scale, scheme.offset);
        }
        put<N>(place.out + begin, narrow<T>(fake), count);
    }

    __device__ __forceinline__ void store_int8(int8_t* q, int count, const Scheme& scheme) const {
        Pack<int8_t, N> integers;
        const Pack<float, N> x = widen(at);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (i < count) integers.at[i] = integer_of(x.at[i], scheme);
        }
        put<N>(q, integers, count);
    }

    __device__ __forceinline__ void store_int4(uint8_t* q, int count, const Scheme& scheme) const {
        Pack<uint8_t, N / 2> bytes;
        const Pack<float, N> x = widen(at);
#pragma unroll
        for (int i = 0; i < N; i += 2) {  // of an odd count the last high nibble is 0
            const int8_t low = i < count ? integer_of(x.at[i], scheme) : int8_t{0};
            const int8_t high = i + 1 < count ? integer_of(x.at[i + 1], scheme) : int8_t{0};
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
__device__ __forceinline__ int64_t number_in_result(const GroupArgs& args, int64_t group) {
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

// All that some threads hold of a group: `count` of them, each its units in turn.
template <typename T, bool kAligned, int kUnits>
struct Held {
    Unit<T, kAligned> units[kUnits];
    int number;  // of this thread among `count`
    int count;

    __device__ __forceinline__ int begin(int unit) const { return (unit * count + number) * kWide<T>; }

    __device__ __forceinline__ void load(const Place<T>& place) {
#pragma unroll
        for (int i = 0; i < kUnits; ++i) units[i].load(place, begin(i));
    }

    __device__ __forceinline__ Range range(const Place<T>& place) const {
        if constexpr (kAligned && Pairs<T>::kHas) {
            RangeOfPairs<T> range;
#pragma unroll
            for (int i = 0; i < kUnits; ++i) {
                if (begin(i) < place.size) range.include(units[i].at);
            }
            return range.range();
        } else {
            Range range;
#pragma unroll
            for (int i = 0; i < kUnits; ++i) units[i].measure(place, begin(i), range);
            return range;
        }
    }

    template <typename Act>
    __device__ __forceinline__ void each(Act act) const {
#pragma unroll
        for (int i = 0; i < kUnits; ++i) act(units[i], begin(i));
    }

    __device__ __forceinline__ void store(const GroupArgs& args, const Place<T>& place, const Scheme& scheme) const {
        using One = Unit<T, kAligned>;
        if (args.q == nullptr) {
            each([&](const One& unit, int begin) { unit.store_fake(place, begin, scheme); });
        } else if (!scheme.is_finite()) {  // rare: read again, so that the units need not be kept for it
#pragma unroll 1
            for (int i = 0; i < kUnits; ++i) {
                One unit;
                unit.load(place, begin(i));
                unit.store_any(args.num_bits, place, begin(i), scheme);
            }
        } else if (args.num_bits == 8) {
            each([&](const One& unit, int begin) { unit.template store_integers<8>(place, begin, scheme); });
        } else {
            each([&](const One& unit, int begin) { unit.template store_integers<4>(place, begin, scheme); });
        }
    }
};

// Elements of a group that a block holds.
template <typename T>
constexpr int kPiece = kQuantizeThreads * kUnitsOfThread * kWide<T>;

// A group to `args.lanes` neighbours of a warp.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kQuantizeThreads, kBlocksPerProcessor<kAligned>) quantize_by_lanes(GroupArgs args) {
    const int lanes = args.lanes, lane_bits = __ffs(lanes) - 1, thread = threadIdx.x;
    const int64_t group = static_cast<int64_t>(blockIdx.x) * (kQuantizeThreads >> lane_bits) + (thread >> lane_bits);
    const int64_t to = number_in_result(args, group);
    const Place<T> place(args, group, to, 0, kPiece<T>);
    Held<T, kAligned, kUnitsOfLane> held;
    held.number = thread & (lanes - 1);
    held.count = lanes;
    held.load(place);
    const Scheme scheme = scheme_of(joined_by_lanes(held.range(place), lanes), args.num_bits, args.symmetric);
    if (group >= args.num_groups) return;
    if (held.number == 0) store_params(args, to, scheme);
    held.store(args, place, scheme);
}

template <typename T, bool kAligned>
struct HeldByBlock : Held<T, kAligned, kUnitsOfThread> {
    __device__ __forceinline__ HeldByBlock() {
        this->number = threadIdx.x;
        this->count = blockDim.x;
    }
};

// A group to a block, of as many threads as have something to do.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kQuantizeThreads, kBlocksPerProcessor<kAligned>) quantize_by_block(GroupArgs args) {
    const int64_t to = number_in_result(args, blockIdx.x);
    const Place<T> place(args, blockIdx.x, to, 0, kPiece<T>);
    HeldByBlock<T, kAligned> held;
    held.load(place);
    const Scheme scheme = scheme_of(joined_by_block(held.range(place)), args.num_bits, args.symmetric);
    if (threadIdx.x == 0) store_params(args, to, scheme);
    held.store(args, place, scheme);
}

// A long group, first of three: the range of each piece.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kQuantizeThreads, kBlocksPerProcessor<kAligned>) measure_pieces(GroupArgs args) {
    const int64_t group = blockIdx.x / args.pieces, begin = blockIdx.x % args.pieces * kPiece<T>;
    const Place<T> place(args, group, group, begin, kPiece<T>);
    HeldByBlock<T, kAligned> held;
    held.load(place);
    const Range range = joined_by_block(held.range(place));
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
    store_params(args, number_in_result(args, group), scheme_of(range, args.num_bits, args.symmetric));
}

// Third.
template <typename T, bool kAligned>
__global__ void __launch_bounds__(kQuantizeThreads, kBlocksPerProcessor<kAligned>) convert_pieces(GroupArgs args) {
    const int64_t group = blockIdx.x / args.pieces, begin = blockIdx.x % args.pieces * kPiece<T>;
    const Place<T> place(args, group, number_in_result(args, group), begin, kPiece<T>);
    HeldByBlock<T, kAligned> held;
    held.load(place);
    held.store(args, place, scheme_of(args.of_group[group], args.num_bits, args.symmetric));
}

}  // namespace ds
