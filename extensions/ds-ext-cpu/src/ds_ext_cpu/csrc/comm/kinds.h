// The words of this library: collectives, operations and element types, and how messages name them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ds_cpu::comm {

enum class Kind : uint32_t {
    kNone,
    kAllReduce,
    kReduce,
    kReduceScatter,
    kAllGather,
    kBroadcast,
    kAllToAll,
    kGather,
    kScatter,
    kBarrier,
};

enum class Op : uint32_t { kSum, kAverage, kProduct, kMin, kMax, kAnd, kOr, kXor, kNone };

// Element types that can be reduced, and kBytes for all others, which are only moved.
enum class Dtype : uint32_t { kFloat, kDouble, kBf16, kFp16, kInt8, kUint8, kInt16, kInt32, kInt64, kBool, kBytes };

constexpr const char* name(Kind kind) {
    constexpr const char* names[] = {"nothing",     "an all-reduce", "a reduce", "a reduce-scatter", "an all-gather",
                                     "a broadcast", "an all-to-all", "a gather", "a scatter",        "a barrier"};
    return names[static_cast<int>(kind)];
}

constexpr const char* name(Op op) {
    constexpr const char* names[] = {"sum", "average", "product", "min", "max", "and", "or", "xor", ""};
    return names[static_cast<int>(op)];
}

constexpr const char* name(Dtype dtype) {
    constexpr const char* names[] = {"float32", "float64", "bfloat16", "float16", "int8", "uint8",
                                     "int16",   "int32",   "int64",    "bool",    "bytes"};
    return names[static_cast<int>(dtype)];
}

constexpr size_t size_of(Dtype dtype) {
    constexpr size_t sizes[] = {4, 8, 2, 2, 1, 1, 2, 4, 8, 1, 1};
    return sizes[static_cast<int>(dtype)];
}

constexpr bool is_floating(Dtype dtype) { return dtype <= Dtype::kFp16; }

}  // namespace ds_cpu::comm
