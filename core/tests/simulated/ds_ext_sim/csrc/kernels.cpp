// Operators that torch calls for other devices than the host only, or that a fallback cannot serve.

#include <ATen/SDPBackend.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <torch/library.h>

#include "hooks.h"
#include "memory.h"
#include "queues.h"
#include "tensors.h"

namespace sim {

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor or_undefined(const OptionalTensor& tensor) { return tensor.value_or(Tensor()); }
OptionalTensor or_none(const Tensor& tensor) { return tensor.defined() ? OptionalTensor(tensor) : std::nullopt; }
Tensor zeros_like(const Tensor& tensor) { return host_tensor(zero_storage(tensor.storage()), tensor); }

// ----- attention: the host's flash attention where the host would take it -------------------------------------------

int64_t attention_choice(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
                         double dropout, bool is_causal, std::optional<double> scale, bool enable_gqa) {
    const auto host_mask = mask.has_value() && mask->defined() ? OptionalTensor(zeros_like(*mask)) : std::nullopt;
    const auto choice = at::_fused_sdp_choice(zeros_like(query), zeros_like(key), zeros_like(value), host_mask, dropout,
                                              is_causal, scale, enable_gqa);
    const bool is_flash = choice == static_cast<int64_t>(at::SDPBackend::flash_attention);
    return static_cast<int64_t>(is_flash ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& bias, double dropout,
    bool is_causal, bool, std::optional<double> scale) {
    const int device = query.device().index();
    const auto work = [=](const std::vector<Tensor>& host) -> std::vector<Tensor> {
        auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(host[0], host[1], host[2], dropout,
                                                                           is_causal, or_none(host[3]), scale);
        return {out, sums};
    };
    const auto results = compute_later(device, {query, key, value, or_undefined(bias)}, work);
    const Tensor none = at::empty({0}, query.options().dtype(at::kLong));
    return {results[0], results[1], none, none, query.size(2), key.size(2), none, none, none};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias,
    std::array<bool, 4>, const Tensor& out, const Tensor& sums, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt,
    double dropout, bool is_causal, const Tensor&, const Tensor&, std::optional<double> scale) {
    const auto work = [=](const std::vector<Tensor>& host) -> std::vector<Tensor> {
        auto [query_grad, key_grad, value_grad] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
            host[0], host[1], host[2], host[3], host[4], host[5], dropout, is_causal, or_none(host[6]), scale);
        return {query_grad, key_grad, value_grad};
    };
    const auto results = compute_later(query.device().index(), {grad, query, key, value, out, sums, bias}, work);
    return {results[0], results[1], results[2], Tensor()};
}

// ----- convolution --------------------------------------------------------------------------------------------------

Tensor convolution(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, at::IntArrayRef stride,
                   at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
                   int64_t groups) {
    const auto work = [=, stride = stride.vec(), padding = padding.vec(), dilation = dilation.vec(),
                       output_padding = output_padding.vec()](const std::vector<Tensor>& host) -> std::vector<Tensor> {
        return {at::convolution(host[0], host[1], or_none(host[2]), stride, padding, dilation, transposed,
                                output_padding, groups)};
    };
    return compute_later(input.device().index(), {input, weight, or_undefined(bias)}, work)[0];
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                        at::IntArrayRef stride, at::IntArrayRef padding,
                                                        at::IntArrayRef dilation, bool transposed,
                                                        at::IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> wanted) {
    const std::vector<int64_t> bias_sizes{transposed ? weight.size(1) * groups : weight.size(0)};
    const auto work = [=, stride = stride.vec(), padding = padding.vec(), dilation = dilation.vec(),
                       output_padding = output_padding.vec()](const std::vector<Tensor>& host) -> std::vector<Tensor> {
        auto [input_grad, weight_grad, bias_grad] =
            at::convolution_backward(host[0], host[1], host[2], at::IntArrayRef(bias_sizes), stride, padding, dilation,
                                     transposed, output_padding, groups, wanted);
        return {input_grad, weight_grad, bias_grad};
    };
    const auto results = compute_later(input.device().index(), {grad, input, weight}, work);
    return {results[0], results[1], results[2]};
}

// ----- dropout: with numbers of the device's generator --------------------------------------------------------------

std::tuple<Tensor, Tensor> dropout(const Tensor& input, double probability, std::optional<bool> train) {
    if (!train.value_or(true)) return {input, at::empty_like(input, input.options().dtype(at::kBool)).fill_(true)};
    Tensor kept = at::empty_like(input, input.options().dtype(at::kBool));
    kept.bernoulli_(1 - probability, default_generator(input.device().index()));
    return {input.mul(kept).mul_(probability < 1 ? 1 / (1 - probability) : 0), kept};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("_scaled_dot_product_fused_attention_overrideable", &attention);
    m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward);
    m.impl("convolution_overrideable", &convolution);
    m.impl("convolution_backward_overrideable", &convolution_backward);
    m.impl("native_dropout", &dropout);
}

// ----- what the vendor's Python module asks: torch.ops.ds_sim -------------------------------------------------------

TORCH_LIBRARY(ds_sim, m) {
    m.def("set_device_count(int count) -> ()", [](int64_t count) { set_device_count(static_cast<int>(count)); });
    m.def("device_count() -> int", []() -> int64_t { return device_count(); });
    m.def("default_generator(int device) -> Generator?",
          [](int64_t device) { return default_generator(static_cast<int>(device)); });
    m.def("set_total_memory(int device, int bytes) -> ()",
          [](int64_t device, int64_t bytes) { set_total_memory(static_cast<int>(device), bytes); });
    m.def("set_schedule(int schedule) -> ()", [](int64_t schedule) { set_schedule(static_cast<Schedule>(schedule)); });
    m.def("lose_device(int device, int operations) -> ()",
          [](int64_t device, int64_t operations) { lose_device(static_cast<int>(device), operations); });
    m.def("host_waits() -> int", []() -> int64_t { return host_waits(); });
    m.def("waiting_jobs(int device) -> int", [](int64_t device) { return waiting_jobs(static_cast<int>(device)); });
}

}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::attention_choice)
}
