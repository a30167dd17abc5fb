// The same tensor seen from the host, and results of the host as tensors of a device.

#pragma once

#include <ATen/core/Tensor.h>

namespace sim {

inline bool is_sim(const at::Tensor& tensor) {
    return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

// A tensor of the host over the bytes of `tensor`. It keeps nothing alive.
at::Tensor host_alias(const at::Tensor& tensor);

// An uninitialized tensor of a device.
at::Tensor empty_on(int device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);

// A copy of `host`, storage and all, on a device.
at::Tensor to_device(const at::Tensor& host, int device);

// A tensor over the storage of `tensor`, in sizes and strides of `like`.
at::Tensor view_of(const at::Tensor& tensor, const at::Tensor& like);

// Gives `storage` at least this many bytes; its content stays.
void grow(const c10::Storage& storage, size_t num_bytes);

// Copies in every direction, in the order of the current streams.
void copy_tensor(const at::Tensor& from, const at::Tensor& to, bool non_blocking);

}  // namespace sim
