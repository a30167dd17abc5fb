#include "comm/reduce.h"

#include <cstdint>

#include "common/half.h"
#include "common/isa.h"

namespace ds_cpu {

using ReduceOp = comm::Op;

}  // namespace ds_cpu

#define DS_CPU_LOOPS "comm/reduce_loops.h"
#include "common/each_isa.h"

namespace ds_cpu::comm {
namespace {

using Reduce = void (*)(void*, const void* const*, int, int64_t);

template <typename T>
Reduce floating(Op op) {
    switch (op) {
        case Op::kAverage:
            return DS_CPU_CHOOSE(reduce_range<T, Op::kAverage>);
        case Op::kProduct:
            return DS_CPU_CHOOSE(reduce_range<T, Op::kProduct>);
        case Op::kMin:
            return DS_CPU_CHOOSE(reduce_range<T, Op::kMin>);
        case Op::kMax:
            return DS_CPU_CHOOSE(reduce_range<T, Op::kMax>);
        default:
            return DS_CPU_CHOOSE(reduce_range<T, Op::kSum>);
    }
}

// Sums wrap around, as torch's do.
template <typename T>
T together(Op op, T a, T b) {
    switch (op) {
        case Op::kProduct:
            return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
        case Op::kMin:
            return b < a ? b : a;
        case Op::kMax:
            return a < b ? b : a;
        case Op::kAnd:
            return a & b;
        case Op::kOr:
            return a | b;
        case Op::kXor:
            return a ^ b;
        default:
            return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
    }
}

template <typename T>
void integral(Op op, void* to_bytes, const void* const* sources, int num_sources, int64_t numel) {
    T* to = static_cast<T*>(to_bytes);
    for (int64_t i = 0; i < numel; ++i) {
        T value = static_cast<const T*>(sources[0])[i];
        for (int source = 1; source < num_sources; ++source) {
            value = together<T>(op, value, static_cast<const T*>(sources[source])[i]);
        }
        to[i] = op == Op::kAverage ? static_cast<T>(value / num_sources) : value;
    }
}

// A sum of truth values is true where one is, a product where all are.
Op of_truth(Op op) {
    switch (op) {
        case Op::kSum:
        case Op::kMax:
            return Op::kOr;
        case Op::kProduct:
        case Op::kMin:
            return Op::kAnd;
        default:
            return op;
    }
}

}  // namespace

bool can_reduce(Op op, Dtype dtype) {
    if (dtype == Dtype::kBytes || op == Op::kNone) return false;
    if (op == Op::kAnd || op == Op::kOr || op == Op::kXor) return !is_floating(dtype);
    return op != Op::kAverage || dtype != Dtype::kBool;
}

void reduce(void* to, const void* const* sources, int num_sources, size_t numel, Op op, Dtype dtype) {
    const auto count = static_cast<int64_t>(numel);
    switch (dtype) {
        case Dtype::kFloat:
            return floating<float>(op)(to, sources, num_sources, count);
        case Dtype::kDouble:
            return floating<double>(op)(to, sources, num_sources, count);
        case Dtype::kBf16:
            return floating<Bf16>(op)(to, sources, num_sources, count);
        case Dtype::kFp16:
            return floating<Fp16>(op)(to, sources, num_sources, count);
        case Dtype::kInt8:
            return integral<int8_t>(op, to, sources, num_sources, count);
        case Dtype::kUint8:
            return integral<uint8_t>(op, to, sources, num_sources, count);
        case Dtype::kInt16:
            return integral<int16_t>(op, to, sources, num_sources, count);
        case Dtype::kInt32:
            return integral<int32_t>(op, to, sources, num_sources, count);
        case Dtype::kInt64:
            return integral<int64_t>(op, to, sources, num_sources, count);
        case Dtype::kBool:
            return integral<uint8_t>(of_truth(op), to, sources, num_sources, count);
        case Dtype::kBytes:
            break;  // `can_reduce` was asked
    }
}

}  // namespace ds_cpu::comm
