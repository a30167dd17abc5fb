// Making, resizing and copying tensors: what an operator by fallback cannot do.

#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "memory.h"
#include "queues.h"

namespace sim {

namespace {

constexpr auto kKeys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);

c10::Allocator* device_allocator() { return c10::GetAllocator(c10::DeviceType::PrivateUse1); }

c10::Device or_current(std::optional<c10::Device> device) {
    return device.has_value() && device->has_index() ? *device : device_at(current_device());
}

void check_options(std::optional<at::Layout> layout, std::optional<bool> pin_memory) {
    TORCH_CHECK_NOT_IMPLEMENTED(layout.value_or(at::kStrided) == at::kStrided, device_name(),
                                " has strided tensors only, not ", *layout);
    TORCH_CHECK(!pin_memory.value_or(false), "only tensors of the host can be pinned, not those of ", device_name());
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<c10::Device> device, std::optional<bool> pin_memory,
                 std::optional<at::MemoryFormat> memory_format) {
    check_options(layout, pin_memory);
    const c10::DeviceGuard guard(or_current(device));
    return at::detail::empty_generic(sizes, device_allocator(), kKeys, c10::dtype_or_default(dtype), memory_format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> layout, std::optional<c10::Device> device,
                         std::optional<bool> pin_memory) {
    check_options(layout, pin_memory);
    const c10::DeviceGuard guard(or_current(device));
    return at::detail::empty_strided_generic(sizes, strides, device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

void copy_now(const at::Tensor& from, const at::Tensor& to) {
    const HostScope scope;
    at::Tensor target = to;
    target.copy_(from);
}

}  // namespace

at::Tensor host_tensor(c10::Storage storage, const at::Tensor& like) {
    auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                         like.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    made._set_conj(like.is_conj());
    made._set_neg(like.is_neg());
    return made;
}

c10::Storage host_storage(const c10::Storage& storage) {
    c10::DataPtr bytes(host_address(storage.data()), c10::Device(c10::DeviceType::CPU));
    return {c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(bytes), c10::GetCPUAllocator(), true};
}

c10::Storage zero_storage(const c10::Storage& storage) {
    void* zeros = std::calloc(std::max<size_t>(storage.nbytes(), 1), 1);
    TORCH_CHECK(zeros != nullptr, "the host has no ", storage.nbytes(), " bytes");
    c10::DataPtr bytes(zeros, zeros, &std::free, c10::Device(c10::DeviceType::CPU));
    return {c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(bytes), c10::GetCPUAllocator(), true};
}

at::Tensor empty_as(const at::Tensor& host, int device) {
    if (!host.defined()) return host;
    const c10::DeviceGuard guard(device_at(device));
    return at::detail::empty_strided_generic(host.sizes(), host.strides(), device_allocator(), kKeys,
                                             host.scalar_type());
}

void deliver(const at::Tensor& result, const at::Tensor& target) {
    if (!target.defined()) return;
    TORCH_CHECK(result.defined() && result.sizes() == target.sizes() && result.dtype() == target.dtype(),
                "an operator that runs late gave another result than it did for zeros: ",
                result.defined() ? result.toString() : "none");
    copy_now(result, target);
}

std::vector<at::Tensor> compute_later(int device, const std::vector<at::Tensor>& inputs, const Work& work) {
    std::vector<at::Tensor> zeros, aliases, results, targets;
    for (const at::Tensor& input : inputs) {
        zeros.push_back(input.defined() ? host_tensor(zero_storage(input.storage()), input) : input);
        aliases.push_back(input.defined() ? host_alias(input) : input);
    }
    count_operation(device);
    {
        const HostScope scope;
        results = work(zeros);
    }
    for (at::Tensor& result : results) {
        result = empty_as(result, device);
        targets.push_back(result.defined() ? host_alias(result) : result);
    }
    enqueue(device, current_stream(device), [aliases, targets, work] {
        const HostScope scope;
        const std::vector<at::Tensor> computed = work(aliases);
        for (size_t index = 0; index < targets.size(); ++index) deliver(computed[index], targets[index]);
    });
    return results;
}

at::Tensor to_device(const at::Tensor& host, int device) {
    const c10::DeviceGuard guard(device_at(device));
    const size_t num_bytes = host.storage().nbytes();
    c10::Storage storage(c10::Storage::use_byte_size_t(), num_bytes, device_allocator(), true);
    finish_current_stream(device);
    if (num_bytes > 0) std::memcpy(host_address(storage.data()), host.storage().data(), num_bytes);
    auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), kKeys, host.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    return made;
}

at::Tensor view_of(const at::Tensor& tensor, const at::Tensor& like) {
    auto made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(tensor.storage()),
                                                         tensor.key_set(), like.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    made._set_conj(like.is_conj());
    made._set_neg(like.is_neg());
    return made;
}

void grow(const c10::Storage& storage, size_t num_bytes) {
    if (storage.nbytes() >= num_bytes) return;
    const c10::DeviceGuard guard(storage.device());
    c10::DataPtr grown = device_allocator()->allocate(num_bytes);
    if (storage.nbytes() > 0) device_allocator()->copy_data(grown.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(grown));
    storage.set_nbytes(num_bytes);
}

namespace {

// Between two devices it is a job of the source's stream, behind what the target's stream was given, before what comes.
void copy_of_devices(const at::Tensor& from, const at::Tensor& to) {
    const int source = from.device().index(), target = to.device().index();
    const c10::StreamId reads = current_stream(source), writes = current_stream(target);
    auto copy = [from = host_alias(from), to = host_alias(to)] { copy_now(from, to); };
    count_operation(source);
    if (source == target) {
        enqueue(source, reads, copy);
        return;
    }
    count_operation(target);
    enqueue_wait(source, reads, end_of(target, writes));
    enqueue_wait(target, writes, enqueue(source, reads, copy));
}

}  // namespace

void copy_tensor(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
    if (to.numel() == 0) return;
    if (is_sim(from) && is_sim(to)) return copy_of_devices(from, to);
    const bool arrives = is_sim(to);
    const int device = (arrives ? to : from).device().index();
    count_operation(device);
    // The device's side is a bare address: whoever frees it while the copy waits has made a mistake. The host's side is
    // kept, as an allocator of page-locked memory keeps what a copy still uses.
    at::Tensor source = arrives ? from.detach() : host_alias(from);
    const at::Tensor target = arrives ? host_alias(to) : to.detach();
    const bool locked = is_pinned((arrives ? from : to).storage().data());
    if (!non_blocking || (!arrives && !locked)) {
        count_host_wait();
        finish_current_stream(device);
        copy_now(source, target);
        return;
    }
    if (!locked) source = source.clone();  // the call may return when the host's memory has been read
    enqueue(device, current_stream(device), [source, target] { copy_now(source, target); });
}

namespace {

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
    copy_tensor(from.sizes() == to.sizes() ? from : from.expand_as(to), to, non_blocking);
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
    at::native::resize_output(to, from.sizes());
    copy_tensor(from, to, false);
    return to;
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> memory_format) {
    c10::TensorImpl* impl = self.unsafeGetTensorImpl();
    if (impl->sizes() != sizes) {
        impl->set_sizes_contiguous(sizes);
        grow(self.storage(), at::detail::computeStorageNbytesContiguous(sizes, self.dtype().itemsize(),
                                                                        static_cast<size_t>(self.storage_offset())));
    }
    if (memory_format.has_value()) impl->empty_tensor_restride(*memory_format);
    return self;
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
    count_operation(tensor.device().index());
    count_host_wait();
    finish_current_stream(tensor.device().index());
    return at::_local_scalar_dense(host_alias(tensor));
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
    return at::native::set_storage_cpu_(self, source.storage(), source.storage_offset(), source.sizes(),
                                        source.strides());
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage source) {
    const auto numel = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
    return at::native::set_storage_cpu_(self, std::move(source), 0, {numel}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
    record_use(self.storage().data(), stream.device_index(), stream.id());
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("resize_", &resize);
    m.impl("_copy_from", &copy_from);
    m.impl("_copy_from_and_resize", &copy_from_and_resize);
    m.impl("_local_scalar_dense", &local_scalar_dense);
    m.impl("set_.source_Storage", &set_storage);
    m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
    m.impl("set_.source_Tensor", &set_tensor);
    m.impl("is_set_to", &at::native::is_set_to);  // of the fallback the host would wait, as it returns a value
    m.impl("record_stream", &record_stream);
}

// A copy takes a conjugated or negated view as it is: torch would copy it first, by this very operator.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace sim
