// Lion by way of the host: copied there, computed by `lion_kernel`, copied back. That is right on every device and fast
// on none. It holds the place of a launch on the device's current stream, which uses the tensors where they are.

#include <torch/csrc/stable/ops.h>

#include "lion/lion.h"
#include "lion/lion_kernel.h"

namespace ds_{{ cookiecutter.device_name }} {

// `tensor` in fp32 in host memory; itself, when it is that already.
static Tensor on_host(const Tensor& tensor) {
    const torch::stable::Device host(torch::headeronly::DeviceType::CPU);
    return torch::stable::to(tensor, torch::headeronly::ScalarType::Float, std::nullopt, host);
}

void step(LionTensors& tensors, const LionFactors& by) {
    Tensor param = on_host(tensors.param);
    Tensor grad = on_host(tensors.grad);
    Tensor exp_avg = on_host(tensors.exp_avg);
    lion_kernel(param.mutable_data_ptr<float>(), grad.const_data_ptr<float>(), exp_avg.mutable_data_ptr<float>(),
                param.numel(), &by);
    torch::stable::copy_(tensors.param, param);
    torch::stable::copy_(tensors.exp_avg, exp_avg);
    if (tensors.copy != nullptr) {
        Tensor copy = *tensors.copy;
        torch::stable::copy_(copy, param);
    }
}

}  // namespace ds_{{ cookiecutter.device_name }}
