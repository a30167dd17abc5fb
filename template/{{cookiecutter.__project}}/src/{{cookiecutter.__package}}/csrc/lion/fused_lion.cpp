// The operator `lion_step_`: checks its lists, then steps each parameter. What runs on the device is in `step`.

#include <torch/csrc/stable/library.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "lion/lion.h"

namespace ds_{{ cookiecutter.device_name }} {

static void check_count(const char* name, size_t found, size_t expected) {
    if (found == expected) return;
    throw std::runtime_error(std::string("lion_step_: ") + name + ": found " + std::to_string(found) +
                             " tensors, but it must be " + std::to_string(expected) + ", one for each of params");
}

static void check_like_param(const char* name, const Tensor& tensor, const Tensor& param) {
    if (tensor.numel() == param.numel() && tensor.is_contiguous() && tensor.get_device() == param.get_device()) return;
    throw std::runtime_error(std::string("lion_step_: ") + name + ": found " + std::to_string(tensor.numel()) +
                             " elements on device " + std::to_string(tensor.get_device()) +
                             (tensor.is_contiguous() ? "" : ", not contiguous") + ", but it must be " +
                             std::to_string(param.numel()) + " contiguous ones on device " +
                             std::to_string(param.get_device()) + ", as its parameter");
}

static void lion_step(std::vector<Tensor> params, std::vector<Tensor> grads, std::vector<Tensor> exp_avgs,
                      std::vector<Tensor> steps, std::vector<Tensor> copies, double lr, double beta1, double beta2,
                      double weight_decay, double grad_scale) {
    check_count("grads", grads.size(), params.size());
    check_count("exp_avgs", exp_avgs.size(), params.size());
    check_count("steps", steps.size(), params.size());
    if (!copies.empty()) check_count("copies", copies.size(), params.size());
    for (size_t index = 0; index < params.size(); ++index) {
        check_like_param("params", params[index], params[index]);
        check_like_param("grads", grads[index], params[index]);
        check_like_param("exp_avgs", exp_avgs[index], params[index]);
        if (!copies.empty()) check_like_param("copies", copies[index], params[index]);
        if (!steps[index].is_cpu()) throw std::runtime_error("lion_step_: steps must be in host memory");
    }
    const LionFactors by = {
        .one_minus_beta1 = static_cast<float>(1 - beta1),
        .one_minus_beta2 = static_cast<float>(1 - beta2),
        .lr = static_cast<float>(lr),
        .shrink = static_cast<float>(1 - lr * weight_decay),
        .grad_scale = static_cast<float>(grad_scale),
    };
    for (size_t index = 0; index < params.size(); ++index) {
        LionTensors tensors{params[index], grads[index], exp_avgs[index], copies.empty() ? nullptr : &copies[index]};
        step(tensors, by);
        *steps[index].mutable_data_ptr<float>() += 1.0f;  // a count, kept on the host
    }
}

}  // namespace ds_{{ cookiecutter.device_name }}

STABLE_TORCH_LIBRARY_FRAGMENT(ds_{{ cookiecutter.device_name }}, m) {
    m.def(
        "lion_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] steps, "
        "Tensor(d!)[] copies, *, float lr, float beta1, float beta2, float weight_decay, float grad_scale) -> ()");
}
{% set keys = {'cuda': 'CUDA', 'sycl': 'XPU'} %}
STABLE_TORCH_LIBRARY_IMPL(ds_{{ cookiecutter.device_name }}, {{ keys.get(cookiecutter.kernel_language, 'CompositeExplicitAutograd') }}, m) {
{%- if cookiecutter.kernel_language in keys %}
    // Tensors of another device are refused by torch.
{%- else %}
    // For tensors of every device, because `step` copies to the host. Once it does not, say your device's key above:
    // PrivateUse1, XPU, ...
{%- endif %}
    m.impl("lion_step_", TORCH_BOX(&ds_{{ cookiecutter.device_name }}::lion_step));
}
