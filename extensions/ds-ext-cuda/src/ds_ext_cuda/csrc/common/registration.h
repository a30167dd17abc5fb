// For which device the operators are registered: cuda. With DS_CUDA_EMULATED (tests/emulated), the same sources run on
// the host, and their operators are registered for the cpu; nothing that is shipped defines it.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#ifdef DS_CUDA_EMULATED
    #define DS_CUDA_LIBRARY_IMPL(m) STABLE_TORCH_LIBRARY_IMPL(ds_cuda, CPU, m)
#else
    #define DS_CUDA_LIBRARY_IMPL(m) STABLE_TORCH_LIBRARY_IMPL(ds_cuda, CUDA, m)
#endif

namespace ds {

#ifdef DS_CUDA_EMULATED
constexpr const char* kDeviceName = "cpu";
static inline bool is_ours(const torch::stable::Tensor& tensor) { return tensor.is_cpu(); }
#else
constexpr const char* kDeviceName = "cuda";
static inline bool is_ours(const torch::stable::Tensor& tensor) { return tensor.is_cuda(); }
#endif

}  // namespace ds
