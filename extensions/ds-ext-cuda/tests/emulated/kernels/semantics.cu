// Small kernels whose result is known, and kernels with one fault each: what the emulation runs and what it finds.
// `probe(name, x)` runs one over 3 blocks of 64 threads; most write x[global index].

#include <cstring>
#include <string>

#include "common/reduce.h"
#include "common/tensors.h"

namespace ds {

constexpr int kThreads = 64, kBlocks = 3;

__device__ int64_t index() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }

// ----- right
// ----------------------------------------------------------------------------------------------------------

__global__ void block_sums(float* x, int64_t) {
    const float first = block_sum(x[index()]);
    x[index()] = first + block_sum(static_cast<float>(threadIdx.x));
}

__global__ void reversed(float* x, int64_t) {
    __shared__ float row[kThreads];
    row[threadIdx.x] = x[index()];
    __syncthreads();
    x[index()] = row[kThreads - 1 - threadIdx.x];
}

__global__ void shuffles(float* x, int64_t) {
    const int lane = threadIdx.x % 32;
    float sum = __shfl_sync(kAllLanes, static_cast<float>(lane), 5);            // 5
    sum += 100 * __shfl_up_sync(kAllLanes, static_cast<float>(lane), 1);        // lane - 1, or 0
    sum += 1e4f * __shfl_down_sync(kAllLanes, static_cast<float>(lane), 1, 8);  // lane + 1 within 8
    if (lane < 16) sum += 0.5f * static_cast<float>(__popc(__ballot_sync(0xffffu, lane % 3 == 0)));
    x[index()] = sum;
}

__global__ void counts(float* x, int64_t) {
    __shared__ int total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    atomicAdd(&total, static_cast<int>(threadIdx.x));
    __syncthreads();
    x[index()] = static_cast<float>(total + __syncthreads_count(threadIdx.x < 10));
}

// ----- wrong
// ----------------------------------------------------------------------------------------------------------

__global__ void reversed_without_barrier(float* x, int64_t) {
    __shared__ float row[kThreads];
    row[threadIdx.x] = x[index()];
    x[index()] = row[kThreads - 1 - threadIdx.x];
}

// Right if lower threads run first: their neighbour has then written.
__global__ void neighbour_without_barrier(float* x, int64_t) {
    __shared__ float row[kThreads];
    row[threadIdx.x] = x[index()];
    x[index()] = row[threadIdx.x == 0 ? 0 : threadIdx.x - 1];
}

// The second reduction overwrites what slower warps still read of the first.
__global__ void shared_reused_without_barrier(float* x, int64_t) {
    __shared__ float row[2];
    float sum = 0;
    for (int round = 0; round < 2; ++round) {
        const float of_warp = warp_reduce(x[index()] + static_cast<float>(round), Sum{});
        if (threadIdx.x % 32 == 0) row[threadIdx.x / 32] = of_warp;
        __syncthreads();
        sum += row[0] + row[1];
    }
    x[index()] = sum;
}

__global__ void barrier_of_some(float* x, int64_t) {
    if (threadIdx.x >= 10) return;
    __syncthreads();
    x[index()] = 1;
}

__global__ void two_barriers(float* x, int64_t) {
    if (threadIdx.x < 10) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    x[index()] = 1;
}

__global__ void shuffle_with_ended_lane(float* x, int64_t) {
    if (threadIdx.x == 3) return;
    x[index()] = warp_reduce(x[index()], Sum{});
}

__global__ void shuffle_outside_mask(float* x, int64_t) {
    if (threadIdx.x % 32 < 16) x[index()] = __shfl_sync(0xffffu, x[index()], 20);
}

__global__ void mask_without_itself(float* x, int64_t) { x[index()] = __shfl_sync(0xffffu, x[index()], 0); }

__global__ void beyond_static_shared(float* x, int64_t) {
    __shared__ float row[kThreads];
    row[threadIdx.x + 1] = x[index()];
    __syncthreads();
    x[index()] = row[threadIdx.x];
}

// The dynamic shared memory of the launch.
__device__ float* dynamic_row() { return reinterpret_cast<float*>(ds_emulated::block().shared()); }

__global__ void beyond_dynamic_shared(float* x, int64_t) {
    float* row = dynamic_row();
    row[threadIdx.x + 1] = x[index()];
    __syncthreads();
    x[index()] = row[threadIdx.x + 1];
}

__global__ void unset_shared(float* x, int64_t) { x[index()] = dynamic_row()[threadIdx.x]; }

__global__ void beyond_the_tensor(float* x, int64_t numel) { x[index() + numel - kThreads * kBlocks + 1] = 0; }

__global__ void misaligned(float* x, int64_t) { x[index()] = read<4>(x + index()).at[0]; }

// ----- the operators
// --------------------------------------------------------------------------------------------------

struct Known {
    const char* name;
    void (*kernel)(float*, int64_t);
    size_t shared_bytes = 0;  // dynamic; not 0: launched past `ds::launch`, which gives none
};

#define DS_KNOWN(name) {#name, name}
const Known kKnown[] = {
    DS_KNOWN(block_sums),
    DS_KNOWN(reversed),
    DS_KNOWN(shuffles),
    DS_KNOWN(counts),
    DS_KNOWN(reversed_without_barrier),
    DS_KNOWN(neighbour_without_barrier),
    DS_KNOWN(shared_reused_without_barrier),
    DS_KNOWN(barrier_of_some),
    DS_KNOWN(two_barriers),
    DS_KNOWN(shuffle_with_ended_lane),
    DS_KNOWN(shuffle_outside_mask),
    DS_KNOWN(mask_without_itself),
    DS_KNOWN(beyond_static_shared),
    {"beyond_dynamic_shared", beyond_dynamic_shared, kThreads * sizeof(float)},
    {"unset_shared", unset_shared, kThreads * sizeof(float)},
    DS_KNOWN(beyond_the_tensor),
    DS_KNOWN(misaligned),
};

static Tensor probe(std::string name, Tensor x, int64_t threads) {
    const OnDevice device(x);
    for (const Known& one : kKnown) {
        if (name != one.name) continue;
        float* const data = static_cast<float*>(x.data_ptr());
        const dim3 block(static_cast<unsigned>(threads));
        if (one.shared_bytes == 0) {
            launch(one.kernel, kBlocks, block, device.stream(), data, x.numel());
        } else {
            const cudaLaunchConfig_t config = {
                .gridDim = kBlocks, .blockDim = block, .dynamicSmemBytes = one.shared_bytes};
            check_cuda(cudaLaunchKernelEx(&config, one.kernel, data, x.numel()), name);
        }
        return x;
    }
    refuse({"probe", "name"}, name, "a kernel of this file");
}

template <typename T>
__global__ void convert(const float* x, int64_t numel, T* out, float* back) {
    if (index() >= numel) return;
    out[index()] = narrow<T>(x[index()]);
    back[index()] = widen(out[index()]);
}

// x rounded to the dtype of `out`, and that in fp32 again.
static Tensor round_trip(Tensor x, Tensor out) {
    const Tensor back = new_tensor(x, sizes_of(x));
    const OnDevice device(x);
    by_dtype(check_float({"round_trip", "out"}, out), [&](auto one) {
        using T = decltype(one);
        launch(convert<T>, grid_of({"round_trip", "x"}, divide_up(x.numel(), 256)), 256, device.stream(),
               data_of<float>(x), x.numel(), static_cast<T*>(out.data_ptr()), static_cast<float*>(back.data_ptr()));
    });
    return back;
}

}  // namespace ds

STABLE_TORCH_LIBRARY_FRAGMENT(ds_cuda_probes, m) {
    m.def("probe(str name, Tensor(a!) x, int threads) -> Tensor(a!)");
    m.def("round_trip(Tensor x, Tensor(a!) out) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(ds_cuda_probes, CPU, m) {
    m.impl("probe", TORCH_BOX(&ds::probe));
    m.impl("round_trip", TORCH_BOX(&ds::round_trip));
}
