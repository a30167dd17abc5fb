// Operators that torch calls for other devices than the host only, or that a fallback cannot serve.

#include <ATen/SDPBackend.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
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

Tensor alias(const Tensor& tensor) { return is_sim(tensor) ? host_alias(tensor) : tensor; }
OptionalTensor alias(const OptionalTensor& tensor) {
    return tensor.has_value() && tensor->defined() ? OptionalTensor(alias(*tensor)) : std::nullopt;
}
Tensor back(const Tensor& host, const Tensor& like) {
    return host.defined() ? to_device(host, like.device().index()) : host;
}
int wait_for(const Tensor& tensor) {
    finish_current_stream(tensor.device().index());
    return tensor.device().index();
}

// ----- attention: the host's flash attention where the host would take it -------------------------------------------

int64_t attention_choice(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
                         double dropout, bool is_causal, std::optional<double> scale, bool enable_gqa) {
    const auto choice = at::_fused_sdp_choice(alias(query), alias(key), alias(value), alias(mask), dropout, is_causal,
                                              scale, enable_gqa);
    const bool is_flash = choice == static_cast<int64_t>(at::SDPBackend::flash_attention);
    return static_cast<int64_t>(is_flash ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& bias, double dropout,
    bool is_causal, bool, std::optional<double> scale) {
    wait_for(query);
    auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(alias(query), alias(key), alias(value), dropout,
                                                                       is_causal, alias(bias), scale);
    const Tensor none = empty_on(query.device().index(), {0}, {1}, at::kLong);
    return {back(out, query), back(sums, query), none, none, query.size(2), key.size(2), none, none, none};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias,
    std::array<bool, 4>, const Tensor& out, const Tensor& sums, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt,
    double dropout, bool is_causal, const Tensor&, const Tensor&, std::optional<double> scale) {
    wait_for(query);
    const OptionalTensor mask = bias.defined() ? OptionalTensor(alias(bias)) : std::nullopt;
    auto [query_grad, key_grad, value_grad] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        alias(grad), alias(query), alias(key), alias(value), alias(out), alias(sums), dropout, is_causal, mask, scale);
    return {back(query_grad, query), back(key_grad, query), back(value_grad, query), Tensor()};
}

// ----- convolution --------------------------------------------------------------------------------------------------

Tensor convolution(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, at::IntArrayRef stride,
                   at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
                   int64_t groups) {
    wait_for(input);
    return back(at::convolution(alias(input), alias(weight), alias(bias), stride, padding, dilation, transposed,
                                output_padding, groups),
                input);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                                                        at::IntArrayRef stride, at::IntArrayRef padding,
                                                        at::IntArrayRef dilation, bool transposed,
                                                        at::IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> wanted) {
    wait_for(input);
    const std::array<int64_t, 1> bias_sizes{transposed ? weight.size(1) * groups : weight.size(0)};
    auto [input_grad, weight_grad, bias_grad] =
        at::convolution_backward(alias(grad), alias(input), alias(weight), at::IntArrayRef(bias_sizes), stride, padding,
                                 dilation, transposed, output_padding, groups, wanted);
    return {back(input_grad, input), back(weight_grad, input), back(bias_grad, input)};
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
    m.def("set_late(bool late) -> ()", [](bool late) { set_late(late); });
    m.def("waiting_jobs(int device) -> int", [](int64_t device) { return waiting_jobs(static_cast<int>(device)); });
}

}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::attention_choice)
}
