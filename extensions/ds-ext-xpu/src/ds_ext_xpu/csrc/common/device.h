// The device as operators see it: which tensors are its own, the queue of its current stream, and a launch.
//
// This is the one header that the tests put another in place of, to run the operators on a CPU: see
// [Note: one text, two compilers] in kernel.h.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <sycl/sycl.hpp>

// Of libtorch_xpu; torch declares it in a header that includes more of ATen than a library of the stable ABI may see.
extern "C" AOTITorchError aoti_torch_get_current_xpu_stream(int32_t device_index, void** ret_stream);

namespace ds_xpu {

inline constexpr const char* kDeviceName = "xpu";

inline int32_t device_type() { return aoti_torch_device_type_xpu(); }

// Where torch queues its own work for this device now.
inline sycl::queue& current_queue(int32_t device_index) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_xpu_stream(device_index, &stream));
    return *static_cast<sycl::queue*>(stream);
}

}  // namespace ds_xpu

// Queues `kernel(args)` for `num_groups` work-groups of `group_size` work-items on `queue`.
#define DS_XPU_LAUNCH(queue, kernel, num_groups, group_size, args)                                            \
    (queue).parallel_for(sycl::nd_range<1>(static_cast<size_t>(num_groups) * static_cast<size_t>(group_size), \
                                           static_cast<size_t>(group_size)),                                  \
                         [args](sycl::nd_item<1>) { kernel(args); })
