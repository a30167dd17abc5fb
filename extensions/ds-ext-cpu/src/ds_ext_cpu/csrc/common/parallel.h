// Work divided over torch's own threads (torch.set_num_threads, OMP_NUM_THREADS); no thread pool of ours.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>

namespace ds_cpu {

// Calls `work(begin, end)` for parts of [0, count), on as many threads as torch uses, at least `grain` each.
// Below one grain it runs here, without waking anyone. `work` must not throw.
template <typename Work>
static inline void parallel_for(int64_t count, int64_t grain, const Work& work) {
    if (count <= 0) return;
    if (count <= grain) {
        work(int64_t{0}, count);
        return;
    }
    const auto call = [](int64_t begin, int64_t end, void* context) {
        (*static_cast<const Work*>(context))(begin, end);
    };
    TORCH_ERROR_CODE_CHECK(
        torch_parallel_for(0, count, grain, call, const_cast<void*>(static_cast<const void*>(&work))));
}

}  // namespace ds_cpu
