// Stands in for CUDA's header of this name: kernels compile with a host compiler, and a launch runs every block of the
// grid here, before it returns. Limits of a launch are those of sm_90. README.md says what this proves.
#pragma once

#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>

#include "block.h"
#include "intrinsics.h"
#include "vector_types.h"
#include "warp.h"

#define CUDART_VERSION 13000

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorInvalidConfiguration = 9,
};
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0, cudaStreamCaptureStatusActive = 1 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
using cudaStream_t = struct CUstream_st*;
struct cudaLaunchAttribute;
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    unsigned numAttrs;
};

inline const char* cudaGetErrorString(cudaError_t code) {
    return code == cudaErrorInvalidConfiguration ? "invalid configuration argument"
           : code == cudaErrorInvalidValue       ? "invalid argument"
                                                 : "no error";
}
inline const char* cudaGetErrorName(cudaError_t code) {
    return code == cudaErrorInvalidConfiguration ? "cudaErrorInvalidConfiguration"
           : code == cudaErrorInvalidValue       ? "cudaErrorInvalidValue"
                                                 : "cudaSuccess";
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) { return *value = 2, cudaSuccess; }

// There are no graphs here. A test sets the variable to see what an operator does under capture.
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
    const char* const stated = std::getenv("DS_CUDA_EMULATED_CAPTURE");
    const bool captures = stated != nullptr && std::string(stated) == "1";
    return *status = captures ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone, cudaSuccess;
}

inline cudaError_t cudaFuncGetName(const char** name, const void* kernel) {
    Dl_info found;
    if (dladdr(kernel, &found) == 0 || found.dli_sname == nullptr) return cudaErrorInvalidValue;
    return *name = found.dli_sname, cudaSuccess;
}

namespace ds_emulated {

// Dynamic shared memory that a kernel has without asking for more.
constexpr size_t kFreeSharedBytes = 48 * 1024;

inline bool is_valid(const cudaLaunchConfig_t& config) {
    const dim3 grid = config.gridDim, size = config.blockDim;
    const uint64_t threads = uint64_t{size.x} * size.y * size.z;
    return grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.x <= 0x7fffffffu && grid.y <= 65535 && grid.z <= 65535 &&
           threads > 0 && threads <= 1024 && size.z <= 64 && config.dynamicSmemBytes <= kFreeSharedBytes;
}

inline std::string name_of(const void* kernel) {
    const char* mangled = "a kernel without a name";
    cudaFuncGetName(&mangled, kernel);
    char* plain = abi::__cxa_demangle(mangled, nullptr, nullptr, nullptr);
    const std::string name = plain == nullptr ? mangled : plain;
    std::free(plain);
    return name;
}

inline void run_grid(const cudaLaunchConfig_t& config, const void* kernel, const std::function<void()>& body) {
    static std::mutex guard;
    const std::lock_guard<std::mutex> held(guard);
    gridDim = config.gridDim;
    blockDim = config.blockDim;
    const uint64_t num_blocks = uint64_t{gridDim.x} * gridDim.y * gridDim.z;
    for (uint64_t i = 0; i < num_blocks; ++i) {
        blockIdx = {static_cast<unsigned>(i % gridDim.x), static_cast<unsigned>(i / gridDim.x % gridDim.y),
                    static_cast<unsigned>(i / gridDim.x / gridDim.y)};
        try {
            block().run(config.blockDim, config.dynamicSmemBytes, i, body);
        } catch (const std::exception& error) {
            throw std::runtime_error(name_of(kernel) + ", block " + at(blockIdx) + ": " + error.what());
        }
    }
}

}  // namespace ds_emulated

template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args&&... args) {
    if (!ds_emulated::is_valid(*config)) return cudaErrorInvalidConfiguration;
    const std::tuple<Params...> given(args...);
    ds_emulated::run_grid(*config, reinterpret_cast<const void*>(kernel), [&] { std::apply(kernel, given); });
    return cudaSuccess;
}
