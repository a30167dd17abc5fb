// What the loop of the gated activation is given. Formulas: deepspeed/ops/transformer/gated.py.
#pragma once

#include <cstdint>

#include "activation/gelu_args.h"

namespace ds_cpu {

// The numbers of deepspeed/ops/transformer/gated.py.
enum class Gate : int64_t { kSilu, kGelu, kGeluTanh };

// Elements that pass through the first cache together.
constexpr int64_t kGatedBlock = 512;

struct GatedArgs {
    int64_t cols;
    int64_t gate_stride;  // elements from one row to the next
    int64_t up_stride;
    Gate gate_form;
    const void* gate;
    const void* up;
    void* out;
};

}  // namespace ds_cpu
