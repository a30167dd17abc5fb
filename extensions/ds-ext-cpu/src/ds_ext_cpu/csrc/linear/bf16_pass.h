// The pass of linear layers for AVX-512 with bf16 products, beside those of each_isa.h; `has_bf16_products()` says
// whether this process can run it.
#pragma once

#include "common/half.h"
#include "common/isa.h"
#include "linear/linear_args.h"

#if defined(DS_CPU_X86)

    #if defined(__clang__)
        #pragma clang attribute push(                                                               \
            __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))), \
            apply_to = function)
    #else
        #pragma GCC push_options
        #pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
    #endif
namespace ds_cpu::avx512bf16 {
// clang-format off
    #include "common/vec_avx512.h"
    #include "common/vec_two.h"
    #include "linear/linear_loops.h"
    #include "linear/bf16_loops.h"
// clang-format on
}  // namespace ds_cpu::avx512bf16
    #if defined(__clang__)
        #pragma clang attribute pop
    #else
        #pragma GCC pop_options
    #endif

#endif

namespace ds_cpu {

static inline bool has_bf16_products() {
#if defined(DS_CPU_X86)
    static const bool has = isa() == Isa::kAvx512 && __builtin_cpu_supports("avx512bf16");
    return has;
#else
    return false;
#endif
}

}  // namespace ds_cpu
