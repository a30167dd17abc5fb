// Whether a call is made while its stream is captured into a CUDA graph, for operators that compute on the host.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "common/launch.h"

namespace ds {

// Raises under capture. A step has its count, bias corrections and learning rate as arguments of its launches: a graph
// would keep them, and each replay would be this step again. Called before the counts are raised.
static inline void refuse_capture(const char* op, cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(stream, &status), std::string("cannot ask for the state of the stream of ") + op);
    if (status == cudaStreamCaptureStatusNone) return;
    throw std::runtime_error(std::string("ds_cuda::") + op +
                             ": found a stream that is being captured into a graph; a replay would repeat this step: "
                             "step outside the graph");
}

}  // namespace ds
