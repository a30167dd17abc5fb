// Every operator of `aten` that has no kernel of its own: run by the host's kernel on aliases of the tensors.
//
// An operator that makes a view does so at once. Nearly every other one is tried on zeros, which tells the sizes of its
// results and refuses wrong arguments, and becomes a job of the current stream. What remains - sizes that depend on
// values, answers to the host - waits for the stream and runs at once, as it does on real devices.

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <string_view>
#include <utility>
#include <vector>

#include "arguments.h"
#include "hooks.h"
#include "queues.h"
#include "tensors.h"

namespace sim {

namespace {

template <typename Visitor>
void each_tensor(const c10::IValue& value, Visitor visit) {
    if (value.isTensor()) {
        visit(value.toTensor());
    } else if (value.isList()) {
        for (const c10::IValue& item : value.toListRef()) {
            if (item.isTensor()) visit(item.toTensor());
        }
    }
}

void call_on_host(const c10::OperatorHandle& op, Stack* stack) {
    const HostScope scope;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

class Call {
  public:
    Call(const c10::OperatorHandle& op, Stack* stack) : op_(op), schema_(op.schema()), stack_(stack) {}

    void run() {
        refuse_what_has_no_kernel();
        find_device();
        refuse_hidden_random_numbers();
        if (makes_views()) return run_now();
        count_operation(device_);
        const bool is_asynchronous = may_be_late();
        if (is_asynchronous && run_later()) return;
        if (!is_asynchronous) count_host_wait();
        finish_current_stream(device_);
        run_now();
    }

  private:
    const c10::OperatorHandle op_;
    const c10::FunctionSchema& schema_;
    Stack* stack_;
    int device_ = -1;

    size_t num_arguments() const { return schema_.arguments().size(); }
    at::ArrayRef<c10::IValue> given() const { return torch::jit::last(*stack_, num_arguments()); }

    void answer(const std::vector<c10::IValue>& values) {
        torch::jit::drop(*stack_, num_arguments());
        stack_->insert(stack_->end(), values.begin(), values.end());
    }

    // ----- what is refused ------------------------------------------------------------------------------------------

    // Operators that other libraries brought for the host, and those for which the host itself has no kernel.
    void refuse_what_has_no_kernel() const {
        const std::string_view name = schema_.name();
        const bool has = name.substr(0, 6) == "aten::" && op_.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
        TORCH_CHECK_NOT_IMPLEMENTED(has, "operator ", schema_.operator_name(), " has no kernel for the device ",
                                    device_name());
    }

    static bool is_plain(const at::Tensor& result) {
        return !result.defined() || (result.layout() == at::kStrided && !result.is_quantized());
    }

    void refuse_other_layouts(const at::Tensor& result) const {
        TORCH_CHECK_NOT_IMPLEMENTED(is_plain(result), "operator ", schema_.operator_name(), " gives a ",
                                    result.is_quantized() ? "quantized" : "sparse", " tensor; ", device_name(),
                                    " has strided tensors only");
    }

    void refuse_hidden_random_numbers() const {
        if (!op_.hasTag(at::Tag::nondeterministic_seeded)) return;
        for (const c10::Argument& argument : schema_.arguments()) {
            if (argument.name() == "generator") return;
        }
        TORCH_CHECK_NOT_IMPLEMENTED(false, "operator ", schema_.operator_name(),
                                    " draws random numbers of the host's generator; ", device_name(),
                                    " has no kernel for it");
    }

    // The one device of all arguments. Tensors of the host may be among them where torch allows it for every device.
    void find_device() {
        for (const c10::IValue& value : given()) {
            each_tensor(value, [&](const at::Tensor& tensor) {
                if (is_sim(tensor) && device_ < 0) device_ = tensor.device().index();
            });
        }
        for (size_t index = 0; index < num_arguments(); ++index) {
            const c10::IValue& value = given()[index];
            each_tensor(value, [&](const at::Tensor& tensor) { check_device(schema_.arguments()[index], tensor); });
            if (device_ < 0 && value.isDevice() && value.toDevice().has_index()) device_ = value.toDevice().index();
        }
        if (device_ < 0) device_ = current_device();
    }

    void check_device(const c10::Argument& argument, const at::Tensor& tensor) const {
        if (!tensor.defined()) return;
        if (is_sim(tensor) ? tensor.device().index() == device_ : may_be_of_host(argument, tensor)) return;
        TORCH_CHECK(false, "Expected all tensors to be on the same device, but ", schema_.operator_name(),
                    " got tensors on ", device_at(device_), " and, as argument '", argument.name(), "', on ",
                    tensor.device());
    }

    static bool may_be_of_host(const c10::Argument& argument, const at::Tensor& tensor) {
        if (!tensor.device().is_cpu() || is_written(argument)) return false;
        return tensor.dim() == 0 || argument.name() == "indices" || argument.name() == "scalars";
    }

    // ----- now ------------------------------------------------------------------------------------------------------

    void run_now() {
        Arguments bytes(schema_, given(), device_, Stand::kBytes);
        Stack results = bytes.values;
        call_on_host(op_, &results);
        for (const Replaced& tensor : bytes.tensors) {
            if (tensor.written) bring_back(tensor);
        }
        const auto on_device = [&](const at::Tensor& result) {
            if (!result.defined()) return result;
            refuse_other_layouts(result);
            if (const Replaced* same = bytes.find(result)) return same->original;
            if (const Replaced* base = bytes.find_storage(result)) return view_of(base->original, result);
            return to_device(result, device_);
        };
        for (c10::IValue& result : results) result = mapped(result, on_device);
        answer(results);
    }

    // What the operator did to the sizes of an argument, and the content where it took other memory for it.
    void bring_back(const Replaced& tensor) {
        if (tensor.host.storage().data() != tensor.bytes) {
            tensor.original.unsafeGetTensorImpl()->set_storage_keep_dtype(to_device(tensor.host, device_).storage());
        }
        reshape(tensor);
    }

    static void reshape(const Replaced& tensor) {
        const at::Tensor& host = tensor.host;
        if (host.sizes() == tensor.original.sizes() && host.strides() == tensor.original.strides() &&
            host.storage_offset() == tensor.original.storage_offset()) {
            return;
        }
        tensor.original.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(),
                                                                     host.storage_offset());
    }

    template <typename Map>
    static c10::IValue mapped(const c10::IValue& value, Map map) {
        if (value.isTensor()) return map(value.toTensor());
        if (!value.isTensorList()) return value;
        c10::List<at::Tensor> tensors;
        for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(map(tensor));
        return tensors;
    }

    // ----- later ----------------------------------------------------------------------------------------------------

    // Only sizes and strides change: of a new tensor over old memory, or in place.
    bool makes_views() const {
        if (op_.hasTag(at::Tag::inplace_view)) return true;
        bool makes = !schema_.returns().empty();
        for (const c10::Argument& result : schema_.returns()) makes &= result.alias_info() && !is_written(result);
        return makes;
    }

    // Whether it says nothing to the host, and values of the device decide over values of the device alone.
    bool may_be_late() const {
        if (op_.hasTag(at::Tag::dynamic_output_shape) || op_.hasTag(at::Tag::data_dependent_output)) return false;
        bool draws = false, reads = false, writes = false, selects = false;
        for (size_t index = 0; index < num_arguments(); ++index) {
            const c10::Argument& argument = schema_.arguments()[index];
            writes |= is_written(argument);
            draws |= argument.name() == "generator";
            each_tensor(given()[index], [&](const at::Tensor& tensor) {
                reads |= !is_written(argument);
                selects |= argument.name() == "indices" && tensor.defined() && is_mask(tensor);
            });
        }
        if (selects) return false;         // how many elements a mask selects is known when it has been computed
        if (draws && reads) return false;  // how many numbers it draws may depend on what it reads
        for (const c10::Argument& result : schema_.returns()) {
            const auto kind = result.type()->kind();
            const bool is_list =
                kind == c10::TypeKind::ListType && result.type()->containedType(0)->kind() == c10::TypeKind::TensorType;
            if (kind != c10::TypeKind::TensorType && !is_list) return false;
        }
        return writes || !schema_.returns().empty();
    }

    static bool is_mask(const at::Tensor& tensor) {
        return tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
    }

    // False: zeros are no input for it, and it has to run now.
    bool run_later() {
        Arguments zeros(schema_, given(), device_, Stand::kZeros);
        std::optional<at::Generator> before;  // the trial draws the numbers, and the job draws them again
        if (zeros.generator.has_value()) before = zeros.values[*zeros.generator].toGenerator().clone();
        Stack results = zeros.values;
        if (!try_on(zeros, results)) {
            if (before.has_value()) zeros.values[*zeros.generator].toGenerator().set_state(before->get_state());
            return false;
        }
        for (const Replaced& tensor : zeros.tensors) {
            if (!tensor.written) continue;
            grow(tensor.original.storage(), tensor.host.storage().nbytes());
            reshape(tensor);
        }
        Arguments bytes(schema_, given(), device_, Stand::kBytes);
        if (before.has_value()) bytes.values[*bytes.generator] = *before;
        std::vector<at::Tensor> targets;
        const auto on_device = [&](const at::Tensor& result) {
            const Replaced* same = result.defined() ? zeros.find(result) : nullptr;
            at::Tensor made = same ? same->original : empty_as(result, device_);
            targets.push_back(same || !made.defined() ? at::Tensor() : host_alias(made));
            return made;
        };
        for (c10::IValue& result : results) result = mapped(result, on_device);
        enqueue(device_, current_stream(device_), [op = op_, arguments = std::move(bytes.values), targets] {
            Stack computed = arguments;
            call_on_host(op, &computed);
            size_t index = 0;
            for (const c10::IValue& value : computed) {
                each_tensor(value, [&](const at::Tensor& result) { deliver(result, targets[index++]); });
            }
        });
        answer(results);
        return true;
    }

    bool try_on(const Arguments& zeros, Stack& results) const {
        try {
            call_on_host(op_, &results);
        } catch (const std::exception&) {
            return false;  // on the values themselves it says what is wrong, if anything is
        }
        bool foretold = true;
        for (const Replaced& tensor : zeros.tensors) {
            foretold &= tensor.host.storage().unsafeGetStorageImpl() == tensor.storage;
        }
        for (const c10::IValue& value : results) {
            each_tensor(value, [&](const at::Tensor& result) {
                if (!result.defined() || zeros.find(result) != nullptr) return;
                foretold &=
                    is_plain(result) && zeros.find_storage(result) == nullptr && result.is_non_overlapping_and_dense();
            });
        }
        return foretold;
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
