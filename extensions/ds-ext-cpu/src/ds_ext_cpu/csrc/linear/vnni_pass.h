// The pass of linear layers for AVX-512 with products of bytes (VNNI), beside those of each_isa.h;
// `has_byte_products()` says whether this process can run it.
#pragma once

#include "common/half.h"
#include "common/isa.h"
#include "linear/linear_args.h"

#if defined(DS_CPU_X86)

    #if defined(__clang__)
        #pragma clang attribute push(                                                               \
            __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))), \
            apply_to = function)
    #else
        #pragma GCC push_options
        #pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
    #endif
namespace ds_cpu::avx512vnni {
// clang-format off
    #include "common/vec_avx512.h"
    #include "common/vec_two.h"
    #include "linear/linear_loops.h"
    #include "linear/vnni_loops.h"
// clang-format on
}  // namespace ds_cpu::avx512vnni
    #if defined(__clang__)
        #pragma clang attribute pop
    #else
        #pragma GCC pop_options
    #endif

#endif

namespace ds_cpu {

static inline bool has_byte_products() {
#if defined(DS_CPU_X86)
    static const bool has = isa() == Isa::kAvx512 && __builtin_cpu_supports("avx512vnni");
    return has;
#else
    return false;
#endif
}

}  // namespace ds_cpu
