// Includes the file named by DS_CPU_LOOPS once per instruction set; see [Note: three passes] in isa.h.
//
//     #define DS_CPU_LOOPS "adam/adam_loops.h"
//     #include "common/each_isa.h"
//
// No include guard: a source file may pass several loops files one after the other.
#include "common/half.h"
#include "common/isa.h"

// Functions called inside a loop are inlined into each pass, so that they are compiled for its target.
namespace ds_cpu::scalar {
#include "common/vec_scalar.h"
#include "common/vec_two.h"
#include DS_CPU_LOOPS
}  // namespace ds_cpu::scalar

#if defined(DS_CPU_X86)

    #if defined(__clang__)
        #pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
    #else
        #pragma GCC push_options
        #pragma GCC target("avx2,fma,f16c")
    #endif
namespace ds_cpu::avx2 {
    #include "common/vec_avx2.h"
    #include "common/vec_two.h"
    #include DS_CPU_LOOPS
}  // namespace ds_cpu::avx2
    #if defined(__clang__)
        #pragma clang attribute pop
        #pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), \
                                     apply_to = function)
    #else
        #pragma GCC pop_options
        #pragma GCC push_options
        #pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
    #endif
namespace ds_cpu::avx512 {
    #include "common/vec_avx512.h"
    #include "common/vec_two.h"
    #include DS_CPU_LOOPS
}  // namespace ds_cpu::avx512
    #if defined(__clang__)
        #pragma clang attribute pop
    #else
        #pragma GCC pop_options
    #endif

#endif

#undef DS_CPU_LOOPS
