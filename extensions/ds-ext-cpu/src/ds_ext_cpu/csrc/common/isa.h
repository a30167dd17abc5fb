// Which instruction set this process uses, chosen once, at run time.
//
// [Note: three passes]
// A library has to run on every machine of its architecture and still use the widest vectors it finds. So an op's loops
// live in a header of their own, `<op>_loops.h`, which `each_isa.h` includes once per instruction set, in the
// namespaces `scalar`, `avx2` and `avx512`, each compiled for its own target. The op's source file then asks
// `DS_CPU_CHOOSE(loop)` for the one that this machine can run. The loops file
//   - includes nothing (its includes belong in the .cpp, above each_isa.h), and has no include guard;
//   - uses `Vec` (vec_*.h) or plain loops that the compiler vectorizes;
//   - uses no lambda, no std function and no exception: code shared with other files must not be compiled for one
//   target.
// On other architectures only the scalar pass exists.
#pragma once

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
    #define DS_CPU_X86 1
    #include <immintrin.h>
#endif

namespace ds_cpu {

enum class Isa { kScalar, kAvx2, kAvx512 };

namespace detail {

static inline Isa best_isa() {
#if defined(DS_CPU_X86)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return avx512 ? Isa::kAvx512 : avx2 ? Isa::kAvx2 : Isa::kScalar;
#else
    return Isa::kScalar;
#endif
}

static inline Isa choose_isa() {
    const char* const names[] = {"scalar", "avx2", "avx512"};
    const Isa best = best_isa();
    const char* const asked = std::getenv("DS_CPU_ISA");
    if (asked == nullptr || *asked == '\0') return best;
    for (int number = 0; number < 3; ++number) {
        if (std::strcmp(asked, names[number]) != 0) continue;
        if (number > static_cast<int>(best)) {
            throw std::runtime_error(std::string("DS_CPU_ISA: found ") + asked +
                                     ", but the best that this machine has is " + names[static_cast<int>(best)] +
                                     "; unset it");
        }
        return static_cast<Isa>(number);
    }
    throw std::runtime_error(std::string("DS_CPU_ISA: found '") + asked + "', but it must be scalar, avx2 or avx512");
}

}  // namespace detail

// The instruction set of this process; `DS_CPU_ISA=scalar|avx2|avx512` in the environment forces one. Read once.
static inline Isa isa() {
    static const Isa chosen = detail::choose_isa();
    return chosen;
}

}  // namespace ds_cpu

// The pass of a function or function template that this process uses, as a pointer; see [Note: three passes].
#if defined(DS_CPU_X86)
    #define DS_CPU_CHOOSE(...)                                            \
        (::ds_cpu::isa() == ::ds_cpu::Isa::kAvx512 ? &avx512::__VA_ARGS__ \
         : ::ds_cpu::isa() == ::ds_cpu::Isa::kAvx2 ? &avx2::__VA_ARGS__   \
                                                   : &scalar::__VA_ARGS__)
#else
    #define DS_CPU_CHOOSE(...) ((void)::ds_cpu::isa(), &scalar::__VA_ARGS__)
#endif
