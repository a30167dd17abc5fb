#include "arguments.h"

#include <ATen/core/jit_type.h>
#include <ATen/ops/clone.h>

#include "hooks.h"

namespace sim {

namespace {

bool is_generator(const c10::Argument& argument) {
    return argument.type()->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()));
}

}  // namespace

Arguments::Arguments(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> given, int device, Stand stand)
    : stand_(stand) {
    for (size_t index = 0; index < given.size(); ++index) {
        const c10::Argument& argument = schema.arguments()[index];
        const c10::IValue& value = given[index];
        if (is_generator(argument)) {
            generator = index;
            values.emplace_back(host_generator(value.isGenerator() ? value.toGenerator() : default_generator(device)));
        } else {
            values.push_back(replaced(value, is_written(argument)));
        }
    }
}

c10::IValue Arguments::replaced(const c10::IValue& value, bool written) {
    if (value.isTensor()) return host_of(value.toTensor(), written);
    if (value.isDevice()) return c10::Device(c10::DeviceType::CPU);
    if (value.isTensorList()) {
        c10::List<at::Tensor> hosts;
        for (const at::Tensor& tensor : value.toTensorVector()) hosts.push_back(host_of(tensor, written));
        return hosts;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> hosts;
        for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
            hosts.push_back(tensor.has_value() ? std::optional(host_of(*tensor, written)) : std::nullopt);
        }
        return hosts;
    }
    return value;
}

at::Tensor Arguments::host_of(const at::Tensor& tensor, bool written) {
    if (!tensor.defined()) return tensor;
    if (!is_sim(tensor)) {  // a value of the host is read before the call returns; a Python number cannot change
        return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : tensor.detach().clone();
    }
    for (Replaced& known : tensors) {
        if (!known.original.is_same(tensor)) continue;
        known.written |= written;
        return known.host;
    }
    const c10::Storage& storage = tensor.storage();
    std::optional<c10::Storage> shared;
    for (const Replaced& known : tensors) {
        if (known.original.storage().is_alias_of(storage)) shared = known.host.storage();
    }
    if (!shared.has_value()) shared = stand_ == Stand::kBytes ? host_storage(storage) : zero_storage(storage);
    at::Tensor host = host_tensor(*shared, tensor);
    tensors.push_back({tensor, host, host.storage().unsafeGetStorageImpl(), host.storage().data(), written});
    return host;
}

const Replaced* Arguments::find(const at::Tensor& host) const {
    for (const Replaced& known : tensors) {
        if (known.host.is_same(host)) return &known;
    }
    return nullptr;
}

const Replaced* Arguments::find_storage(const at::Tensor& host) const {
    for (const Replaced& known : tensors) {
        if (known.host.storage().is_alias_of(host.storage())) return &known;
    }
    return nullptr;
}

}  // namespace sim
