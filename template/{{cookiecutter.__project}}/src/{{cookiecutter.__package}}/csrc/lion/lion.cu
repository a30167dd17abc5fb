// Lion on a CUDA card: one thread per element, on the current stream.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "lion/lion.h"

// Declared here because torch's header wants a CUDA build; weak, so that the library can be looked at without a card.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace ds_{{ cookiecutter.device_name }} {

enum class Dtype { kFp32, kBf16, kFp16 };

// Numbers of a dtype that is known when the kernel runs.
struct Numbers {
    void* data;
    Dtype dtype;

    __device__ float load(int64_t index) const {
        if (dtype == Dtype::kBf16) return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
        if (dtype == Dtype::kFp16) return __half2float(static_cast<const __half*>(data)[index]);
        return static_cast<const float*>(data)[index];
    }

    __device__ void store(int64_t index, float value) const {
        if (dtype == Dtype::kBf16) {
            static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16_rn(value);
        } else if (dtype == Dtype::kFp16) {
            static_cast<__half*>(data)[index] = __float2half_rn(value);
        } else {
            static_cast<float*>(data)[index] = value;
        }
    }
};

static Numbers numbers_of(const char* name, const Tensor& tensor) {
    switch (tensor.scalar_type()) {
        case torch::headeronly::ScalarType::Float:
            return {tensor.data_ptr(), Dtype::kFp32};
        case torch::headeronly::ScalarType::BFloat16:
            return {tensor.data_ptr(), Dtype::kBf16};
        case torch::headeronly::ScalarType::Half:
            return {tensor.data_ptr(), Dtype::kFp16};
        default:
            throw std::runtime_error(std::string("lion_step_: ") + name + " must be float32, bfloat16 or float16");
    }
}

// `copy.data` is null when there is none.
__global__ void lion_kernel(Numbers param, Numbers grad, float* exp_avg, Numbers copy, int64_t numel, LionFactors by) {
    const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; index < numel; index += stride) {
        float value = param.load(index);
        lion_element(value, grad.load(index), exp_avg[index], by);
        param.store(index, value);
        if (copy.data != nullptr) copy.store(index, value);
    }
}

static void check(cudaError_t error) {
    if (error != cudaSuccess) throw std::runtime_error(std::string("lion_step_: ") + cudaGetErrorString(error));
}

void step(LionTensors& tensors, const LionFactors& by) {
    const int64_t numel = tensors.param.numel();
    if (numel == 0) return;
    const Numbers param = numbers_of("params", tensors.param);
    const Numbers grad = numbers_of("grads", tensors.grad);
    const Numbers copy = tensors.copy == nullptr ? Numbers{nullptr, Dtype::kFp32} : numbers_of("copies", *tensors.copy);
    if (numbers_of("exp_avgs", tensors.exp_avg).dtype != Dtype::kFp32) {
        throw std::runtime_error("lion_step_: exp_avgs must be float32");
    }
    float* exp_avg = tensors.exp_avg.mutable_data_ptr<float>();
    const torch::stable::accelerator::DeviceGuard guard(tensors.param.get_device_index());
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensors.param.get_device_index(), &stream));
    constexpr unsigned kThreads = 256;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>((numel + kThreads - 1) / kThreads, 65535)));
    config.blockDim = dim3(kThreads);
    config.stream = static_cast<cudaStream_t>(stream);
    check(cudaLaunchKernelEx(&config, lion_kernel, param, grad, exp_avg, copy, numel, by));
}

}  // namespace ds_{{ cookiecutter.device_name }}
