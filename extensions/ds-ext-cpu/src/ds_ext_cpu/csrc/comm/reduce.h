// Sums, and other reductions, of the same elements of several ranks.
#pragma once

#include <cstddef>

#include "comm/kinds.h"

namespace ds_cpu::comm {

// Whether the operation is defined for such elements.
bool can_reduce(Op op, Dtype dtype);

// Writes the reduction of `sources`, in their order, to `to`, which may be one of them. bf16 and fp16 are added up in
// fp32 and rounded once.
void reduce(void* to, const void* const* sources, int num_sources, size_t numel, Op op, Dtype dtype);

}  // namespace ds_cpu::comm
