// Every operator of `aten` that has no kernel of its own: run by the host's kernel on aliases of the tensors.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <torch/library.h>

#include <array>
#include <string_view>
#include <utility>
#include <vector>

#include "hooks.h"
#include "queues.h"
#include "tensors.h"

namespace sim {

namespace {

using torch::jit::Stack;

// One tensor of the device among the arguments.
struct Argument {
    at::Tensor original;
    at::Tensor alias;
    const void* bytes;  // of the alias, before the call
    bool written;
};

class Call {
  public:
    Call(const c10::OperatorHandle& op, Stack* stack)
        : op_(op), stack_(stack), first_(stack->size() - op.schema().arguments().size()) {}

    void run() {
        refuse_other_namespaces();
        find_device();
        finish_current_stream(device_);
        for (size_t index = 0; index < num_arguments(); ++index) replace(index);
        refuse_hidden_random_numbers();
        {
            at::AutoDispatchBelowADInplaceOrView guard;
            op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
        }
        for (Argument& argument : arguments_) {
            if (argument.written) bring_back(argument);
        }
        const size_t num_returns = op_.schema().returns().size();
        for (size_t index = stack_->size() - num_returns; index < stack_->size(); ++index) {
            (*stack_)[index] = returned((*stack_)[index]);
        }
    }

  private:
    const c10::OperatorHandle& op_;
    Stack* stack_;
    size_t first_;
    int device_ = -1;
    bool has_generator_ = false;
    std::vector<Argument> arguments_;

    size_t num_arguments() const { return op_.schema().arguments().size(); }
    const c10::Argument& schema_of(size_t index) const { return op_.schema().arguments()[index]; }
    c10::IValue& value_of(size_t index) { return (*stack_)[first_ + index]; }

    bool is_written(size_t index) const {
        const auto* alias = schema_of(index).alias_info();
        return alias != nullptr && alias->isWrite();
    }

    void refuse_other_namespaces() const {
        const std::string_view name = op_.schema().name();
        TORCH_CHECK_NOT_IMPLEMENTED(name.substr(0, 6) == "aten::", "operator ", op_.schema().operator_name(),
                                    " has no kernel for the device ", device_name());
    }

    void refuse_hidden_random_numbers() const {
        TORCH_CHECK_NOT_IMPLEMENTED(has_generator_ || !op_.hasTag(at::Tag::nondeterministic_seeded), "operator ",
                                    op_.schema().operator_name(), " draws random numbers of the host's generator; ",
                                    device_name(), " has no kernel for it");
    }

    // The one device of all arguments. Tensors of the host may be among them where torch allows it for every device.
    void find_device() {
        for (size_t index = 0; index < num_arguments(); ++index) {
            each_tensor(value_of(index), [&](const at::Tensor& tensor) {
                if (is_sim(tensor) && device_ < 0) device_ = tensor.device().index();
            });
        }
        for (size_t index = 0; index < num_arguments(); ++index) {
            each_tensor(value_of(index), [&](const at::Tensor& tensor) { check_device(index, tensor); });
            const c10::IValue& value = value_of(index);
            if (device_ < 0 && value.isDevice() && value.toDevice().has_index()) device_ = value.toDevice().index();
        }
        if (device_ < 0) device_ = current_device();
    }

    void check_device(size_t index, const at::Tensor& tensor) const {
        if (is_sim(tensor) ? tensor.device().index() == device_ : may_be_of_host(index, tensor)) return;
        TORCH_CHECK(false, "Expected all tensors to be on the same device, but ", op_.schema().operator_name(),
                    " got tensors on ", device_at(device_), " and, as argument '", schema_of(index).name(), "', on ",
                    tensor.device());
    }

    bool may_be_of_host(size_t index, const at::Tensor& tensor) const {
        if (!tensor.device().is_cpu() || is_written(index)) return false;
        const std::string_view name = schema_of(index).name();
        return tensor.dim() == 0 || name == "indices" || name == "scalars";
    }

    template <typename Visitor>
    static void each_tensor(const c10::IValue& value, Visitor visit) {
        if (value.isTensor()) {
            if (value.toTensor().defined()) visit(value.toTensor());
        } else if (value.isList()) {
            for (const c10::IValue& item : value.toListRef()) {
                if (!item.isTensor()) return;  // a list of numbers, or one with a None in it
                if (item.toTensor().defined()) visit(item.toTensor());
            }
        }
    }

    void replace(size_t index) {
        c10::IValue& value = value_of(index);
        const bool written = is_written(index);
        if (value.isTensor()) {
            value = alias_of(value.toTensor(), written);
        } else if (value.isTensorList()) {
            c10::List<at::Tensor> aliases;
            for (const at::Tensor& tensor : value.toTensorVector()) aliases.push_back(alias_of(tensor, written));
            value = std::move(aliases);
        } else if (value.isOptionalTensorList()) {
            c10::List<std::optional<at::Tensor>> aliases;
            for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
                aliases.push_back(tensor.has_value() ? std::optional(alias_of(*tensor, written)) : std::nullopt);
            }
            value = std::move(aliases);
        } else if (value.isDevice()) {
            value = c10::Device(c10::DeviceType::CPU);
        } else if (is_generator(index)) {
            has_generator_ = true;
            value = host_generator(value.isGenerator() ? value.toGenerator() : default_generator(device_));
        }
    }

    bool is_generator(size_t index) const {
        const auto& type = schema_of(index).type();
        return type->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()));
    }

    at::Tensor alias_of(const at::Tensor& tensor, bool written) {
        if (!is_sim(tensor)) return tensor;
        for (Argument& argument : arguments_) {
            if (!argument.original.is_same(tensor)) continue;
            argument.written |= written;
            return argument.alias;
        }
        at::Tensor alias = host_alias(tensor);
        for (const Argument& argument : arguments_) {  // views of one storage stay views of one storage
            if (argument.original.storage().is_alias_of(tensor.storage())) {
                alias.unsafeGetTensorImpl()->set_storage_keep_dtype(argument.alias.storage());
                break;
            }
        }
        arguments_.push_back({tensor, alias, alias.storage().data(), written});
        return alias;
    }

    // What the operator did to the sizes of an argument, and the content where it took other memory for it.
    void bring_back(Argument& argument) {
        const at::Tensor& alias = argument.alias;
        c10::TensorImpl* original = argument.original.unsafeGetTensorImpl();
        if (alias.storage().data() != argument.bytes) {
            at::Tensor moved = to_device(alias, device_);
            original->set_storage_keep_dtype(moved.storage());
        }
        if (alias.sizes() != argument.original.sizes() || alias.strides() != argument.original.strides() ||
            alias.storage_offset() != argument.original.storage_offset()) {
            original->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
        }
    }

    c10::IValue returned(const c10::IValue& value) {
        if (value.isTensor()) return returned(value.toTensor());
        if (!value.isTensorList()) return value;
        c10::List<at::Tensor> tensors;
        for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(returned(tensor));
        return tensors;
    }

    at::Tensor returned(const at::Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        for (const Argument& argument : arguments_) {
            if (argument.alias.is_same(tensor)) return argument.original;
        }
        for (const Argument& argument : arguments_) {
            if (argument.alias.storage().is_alias_of(tensor.storage())) return view_of(argument.original, tensor);
        }
        return to_device(tensor, device_);
    }
};

void fallback(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// Operators that torch otherwise composes of others, with other rounding, for a device without a kernel of its own.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    for (const char* name : {"native_layer_norm", "native_group_norm", "_fused_rms_norm"}) {
        m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
}

}  // namespace sim
