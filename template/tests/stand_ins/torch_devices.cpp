// In place of what torch's CUDA and XPU builds know of devices: there is one, the host, with one queue. Linked with
// -Bsymbolic, so that the kernel's library calls these and not those of the torch in the process.

#include <torch/csrc/stable/accelerator.h>

#include <sycl/sycl.hpp>

extern "C" {

AOTITorchError aoti_torch_create_device_guard(int32_t, DeviceGuardHandle* guard) {
    *guard = nullptr;
    return 0;
}

AOTITorchError aoti_torch_delete_device_guard(DeviceGuardHandle) { return 0; }

AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
    *stream = nullptr;
    return 0;
}

AOTITorchError aoti_torch_get_current_xpu_stream(int32_t, void** queue) {
    static sycl::queue only;
    *queue = &only;
    return 0;
}

}  // extern "C"
