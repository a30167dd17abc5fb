// Rows of a tensor and the threads that share one: a warp, or a block. A row that fits stays in registers, so that
// memory is read once. Device code, and how the host chooses.
#pragma once

#include "common/dtype.h"
#include "common/launch.h"
#include "common/numbers.h"
#include "common/reduce.h"

namespace ds {

// Accesses that a thread keeps, and threads of a block of rows that a warp takes.
constexpr int kUnitsOfRow = 4;
constexpr int kThreadsOfRows = 256;
constexpr int kHoldingThreads = 512;  // at most: more would have too few registers
constexpr int kStreamThreads = 1024;

// How many threads share a row, and which of them this one is.
template <bool kByWarp>
struct RowThreads {
    static __device__ __forceinline__ int64_t row() {
        if constexpr (!kByWarp) return blockIdx.x;
        return static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarpSize) + threadIdx.x / kWarpSize;
    }
    static __device__ __forceinline__ int number() { return kByWarp ? threadIdx.x % kWarpSize : threadIdx.x; }
    static __device__ __forceinline__ int count() { return kByWarp ? kWarpSize : blockDim.x; }

    template <typename V, typename Op>
    static __device__ __forceinline__ V reduce(V value, Op op, V missing) {
        if constexpr (kByWarp) {
            return warp_reduce(value, op);
        } else {
            return block_reduce(value, op, missing);
        }
    }
    static __device__ __forceinline__ float sum(float value) { return reduce(value, Sum{}, 0.0f); }
};

// What a thread keeps of a row in registers, from access `first` on: `act(i, begin)` for its i-th N neighbours, which
// begin there. Reads are done in a pass of their own before anything is written, so that all are under way together:
// the compiler may not move a read over a write that it cannot tell apart.
template <typename Threads, int N, int kUnits = kUnitsOfRow, typename Act>
__device__ __forceinline__ void each_held(int64_t cols, Act act, int first = 0) {
    const int count = Threads::count(), number = Threads::number(), end = static_cast<int>(cols);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
        const int begin = ((first + i) * count + number) * N;
        if (begin < end) act(i, begin);
    }
}

// A row that does not fit: `act(begin)` for each N neighbours of this thread.
template <typename Threads, int N, typename Act>
__device__ __forceinline__ void each_of_row(int64_t cols, Act act) {
    for (int64_t begin = static_cast<int64_t>(Threads::number()) * N; begin < cols; begin += Threads::count() * N) {
        act(begin);
    }
}

template <int N, typename Value>
__device__ __forceinline__ float sum_of(const Pack<float, N>& pack, Value value) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) sum += value(pack.at[i]);
    return sum;
}

// A vector over the columns in any floating dtype, or none.
struct FloatVector {
    const void* data;  // null: none
    Dtype dtype;

    template <int N>
    __device__ __forceinline__ Pack<float, N> get(int64_t at, float missing) const {
        if (data != nullptr && dtype == Dtype::kFp32) return read<N>(static_cast<const float*>(data) + at);
        if (data != nullptr && dtype == Dtype::kBf16) return widen(read<N>(static_cast<const Bf16*>(data) + at));
        if (data != nullptr) return widen(read<N>(static_cast<const Fp16*>(data) + at));
        Pack<float, N> same;
#pragma unroll
        for (int i = 0; i < N; ++i) same.at[i] = missing;
        return same;
    }

    // Whether N can be read at once, at every multiple of N.
    template <int N>
    bool is_aligned() const {
        return dtype == Dtype::kFp32 ? ds::is_aligned<N>(static_cast<const float*>(data), 0)
                                     : ds::is_aligned<N>(static_cast<const Bf16*>(data), 0);
    }
};

// ----- which threads take a row --------------------------------------------------------------------------------------

enum class RowPlan { kByWarp, kByBlock, kStreamed };

// For rows of `units` accesses.
static inline RowPlan plan_of(int64_t units) {
    if (units <= kUnitsOfRow * kWarpSize) return RowPlan::kByWarp;
    return units <= kUnitsOfRow * kHoldingThreads ? RowPlan::kByBlock : RowPlan::kStreamed;
}

// Threads of a block, a multiple of a warp's, for one row of `units` accesses; of several rows under `kByWarp`.
static inline int threads_of(RowPlan plan, int64_t units) {
    if (plan == RowPlan::kByWarp) return kThreadsOfRows;
    if (plan == RowPlan::kStreamed) return kStreamThreads;
    const int64_t of_warp = static_cast<int64_t>(kUnitsOfRow) * kWarpSize;
    return static_cast<int>((units + of_warp - 1) / of_warp) * kWarpSize;
}

static inline int64_t blocks_of(RowPlan plan, int64_t rows) {
    const int64_t rows_of_block = plan == RowPlan::kByWarp ? kThreadsOfRows / kWarpSize : 1;
    return (rows + rows_of_block - 1) / rows_of_block;
}

}  // namespace ds
