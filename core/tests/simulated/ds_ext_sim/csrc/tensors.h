// The same tensor seen from the host, and results of the host as tensors of a device.

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <functional>
#include <vector>

namespace sim {

inline bool is_sim(const at::Tensor& tensor) {
    return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

// A tensor of the host over `storage`, in sizes and strides of `like`.
at::Tensor host_tensor(c10::Storage storage, const at::Tensor& like);

// The bytes of `storage`, one of a device, as the host reaches them. It keeps nothing alive.
c10::Storage host_storage(const c10::Storage& storage);

// A tensor of the host over the bytes of `tensor`. It keeps nothing alive.
inline at::Tensor host_alias(const at::Tensor& tensor) { return host_tensor(host_storage(tensor.storage()), tensor); }

// As many bytes as `storage` has, of the host, all zero.
c10::Storage zero_storage(const c10::Storage& storage);

// While it lives, operators of the host compute and do nothing else: no autograd, autocast or Python around them.
class HostScope {
    at::AutoDispatchBelowADInplaceOrView below_autograd_;
    c10::impl::ExcludeDispatchKeyGuard below_all_{c10::autocast_dispatch_keyset | c10::python_ks |
                                                  c10::functorch_transforms_ks};
};

// What computes results on tensors of the host, from inputs on tensors of the host; an undefined one stays undefined.
using Work = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

// The results of `work` on a device. Tried on zeros at once, which tells sizes and refuses wrong inputs; a job of the
// current stream computes the values.
std::vector<at::Tensor> compute_later(int device, const std::vector<at::Tensor>& inputs, const Work& work);

// An uninitialized tensor of a device in sizes, strides and dtype of `host`; undefined for an undefined one.
at::Tensor empty_as(const at::Tensor& host, int device);

// Writes `result` to what `target` names: the end of a job.
void deliver(const at::Tensor& result, const at::Tensor& target);

// A copy of `host`, storage and all, on a device. Waits for the current stream.
at::Tensor to_device(const at::Tensor& host, int device);

// A tensor over the storage of `tensor`, in sizes and strides of `like`.
at::Tensor view_of(const at::Tensor& tensor, const at::Tensor& like);

// Gives `storage` at least this many bytes; its content stays.
void grow(const c10::Storage& storage, size_t num_bytes);

// Copies in every direction, in the order of the current streams.
void copy_tensor(const at::Tensor& from, const at::Tensor& to, bool non_blocking);

}  // namespace sim
