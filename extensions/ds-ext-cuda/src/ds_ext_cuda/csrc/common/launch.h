// `ds::launch`: the only place from which a kernel starts.
#pragma once

#include <cuda_runtime.h>
#include <cxxabi.h>

#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace ds {

constexpr int kWarpSize = 32;

// Raises what the runtime says of a call that `what` names.
static inline void check_cuda(cudaError_t code, const std::string& what) {
    if (code == cudaSuccess) return;
    cudaGetLastError();  // an error of a launch is remembered, and would be found by the next call
    throw std::runtime_error("ds_cuda: " + what + ": " + cudaGetErrorString(code) + " (" + cudaGetErrorName(code) +
                             ")");
}

// The kernel's name as the source has it, from the runtime; from before CUDA 12.3, its address.
static inline std::string kernel_name(const void* kernel) {
#if CUDART_VERSION >= 12030
    const char* mangled = nullptr;
    if (cudaFuncGetName(&mangled, kernel) == cudaSuccess && mangled != nullptr) {
        int status = 0;
        char* plain = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
        const std::string name = status == 0 ? plain : mangled;
        std::free(plain);
        return name;
    }
#endif
    return "kernel at " + std::to_string(reinterpret_cast<uintptr_t>(kernel));
}

static inline std::string size_name(dim3 size) {
    return "(" + std::to_string(size.x) + ", " + std::to_string(size.y) + ", " + std::to_string(size.z) + ")";
}

// Starts `kernel` on `stream`; a grid without blocks is no work. Returns before the kernel has run: an error inside it
// is raised by a later call. Raises, with the kernel's name, when it cannot be started.
template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, cudaStream_t stream, const Args&... args) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.stream = stream;
    const cudaError_t code = cudaLaunchKernelEx(&config, kernel, Params(args)...);
    if (code != cudaSuccess) {
        check_cuda(code, "cannot launch " + kernel_name(reinterpret_cast<const void*>(kernel)) + " with grid " +
                             size_name(grid) + ", block " + size_name(block));
    }
}

}  // namespace ds
