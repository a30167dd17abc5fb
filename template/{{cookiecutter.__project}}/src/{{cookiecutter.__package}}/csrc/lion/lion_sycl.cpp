// Lion in SYCL: one work item per element, in the current queue.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>

#include <stdexcept>
#include <string>
#include <sycl/sycl.hpp>

#include "lion/lion.h"

// Declared here because torch's header wants an XPU build; weak, so that the library can be looked at without a card.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_xpu_stream(int32_t device, void** queue);

namespace ds_{{ cookiecutter.device_name }} {

enum class Dtype { kFp32, kBf16, kFp16 };

// Numbers of a dtype that is known when the kernel runs.
struct Numbers {
    void* data;
    Dtype dtype;

    float load(int64_t index) const {
        if (dtype == Dtype::kBf16) return static_cast<const sycl::ext::oneapi::bfloat16*>(data)[index];
        if (dtype == Dtype::kFp16) return static_cast<const sycl::half*>(data)[index];
        return static_cast<const float*>(data)[index];
    }

    void store(int64_t index, float value) const {
        if (dtype == Dtype::kBf16) {
            static_cast<sycl::ext::oneapi::bfloat16*>(data)[index] = value;
        } else if (dtype == Dtype::kFp16) {
            static_cast<sycl::half*>(data)[index] = value;
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
    const LionFactors factors = by;
    void* queue = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_xpu_stream(tensors.param.get_device_index(), &queue));
    static_cast<sycl::queue*>(queue)->parallel_for(sycl::range<1>(numel), [=](sycl::id<1> item) {
        const int64_t index = item[0];
        float value = param.load(index);
        lion_element(value, grad.load(index), exp_avg[index], factors);
        param.store(index, value);
        if (copy.data != nullptr) copy.store(index, value);
    });
}

}  // namespace ds_{{ cookiecutter.device_name }}
