// The device and the stream that an operator works on: those of its first tensor.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <stdexcept>

#include "common/check.h"

#ifndef DS_CUDA_EMULATED
// Only a torch with CUDA has it. Weak, so that the library also links and loads beside one without.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
#endif

namespace ds {

// Makes the tensor's device the current one until the end of the scope; holds its current stream.
//
//     const OnDevice device(x);
//     launch(kernel, grid, block, device.stream(), args);
class OnDevice {
  public:
#ifdef DS_CUDA_EMULATED
    explicit OnDevice(const Tensor&) {}
#else
    explicit OnDevice(const Tensor& tensor) : guard_(tensor.get_device_index()) {
        if (aoti_torch_get_current_cuda_stream == nullptr) throw std::runtime_error("ds_cuda: this torch has no CUDA");
        void* stream = nullptr;
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
        stream_ = static_cast<cudaStream_t>(stream);
    }
#endif

    cudaStream_t stream() const { return stream_; }

  private:
#ifndef DS_CUDA_EMULATED
    torch::stable::accelerator::DeviceGuard guard_;
#endif
    cudaStream_t stream_ = nullptr;
};

}  // namespace ds
