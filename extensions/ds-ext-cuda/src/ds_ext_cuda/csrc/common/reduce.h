// Sums and extremes over a warp and over a block. Every thread of it calls; every thread gets the result.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/launch.h"

namespace ds {

constexpr unsigned kAllLanes = 0xffffffffu;

struct Sum {
    template <typename V>
    __device__ __forceinline__ V operator()(V a, V b) const {
        return a + b;
    }
};

struct Max {
    template <typename V>
    __device__ __forceinline__ V operator()(V a, V b) const {
        return a > b ? a : b;
    }
};

struct Min {
    template <typename V>
    __device__ __forceinline__ V operator()(V a, V b) const {
        return a < b ? a : b;
    }
};

template <typename V, typename Op>
__device__ __forceinline__ V warp_reduce(V value, Op op) {
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        value = op(value, __shfl_xor_sync(kAllLanes, value, distance));
    }
    return value;
}

// Over a block of one dimension whose size is a multiple of a warp's, at most 1024. `missing` changes nothing under
// `op`. May be called again at once: it waits before it writes what others may still be reading.
template <typename V, typename Op>
__device__ __forceinline__ V block_reduce(V value, Op op, V missing) {
    __shared__ V of_warps[kWarpSize];
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    value = warp_reduce(value, op);
    __syncthreads();
    if (lane == 0) of_warps[warp] = value;
    __syncthreads();
    const int num_warps = blockDim.x / kWarpSize;
    return warp_reduce(lane < num_warps ? of_warps[lane] : missing, op);
}

__device__ __forceinline__ float block_sum(float value) { return block_reduce(value, Sum{}, 0.0f); }

}  // namespace ds
