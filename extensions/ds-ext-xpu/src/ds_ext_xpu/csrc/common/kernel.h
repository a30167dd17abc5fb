// What kernels are written with: how one is declared, and its elements as fp32 numbers. Nothing of the host or of
// torch.
//
// [Note: one text, two compilers]
// A kernel is a free function over one struct of arguments. `icpx -fsycl` compiles it into the library and launches it
// from a lambda. The tests have no such compiler: there SYCL's runtime compiles this same text for a CPU, with
// DS_XPU_FREE_FUNCTIONS defined, and finds the kernel by its name. A struct has the same layout in both.
//
// [Note: dtypes are chosen as the kernel runs]
// One kernel serves every mix of dtypes: the branch is the same for all work-items, and next to nothing in a kernel
// that waits for memory.
#pragma once

#include <sycl/sycl.hpp>

#include "common/dtype.h"

#ifdef DS_XPU_FREE_FUNCTIONS
    #define DS_XPU_KERNEL \
        extern "C" SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((sycl::ext::oneapi::experimental::nd_range_kernel<1>))
#else
    #define DS_XPU_KERNEL [[maybe_unused]] static inline
#endif

// A product and a sum are two roundings unless a kernel says fma: then results equal the torch reference's.
#ifdef __clang__
    #pragma clang fp contract(off)
    #define DS_XPU_UNROLL _Pragma("unroll")
#else
    #define DS_XPU_UNROLL
#endif

namespace ds_xpu {

inline sycl::nd_item<1> this_item() { return sycl::ext::oneapi::this_work_item::get_nd_item<1>(); }

// By its bits: holds under a compiler that takes NaN for impossible, too.
inline bool is_nan(float value) { return (sycl::bit_cast<uint32_t>(value) & 0x7FFFFFFFu) > 0x7F800000u; }

inline float widen_bf16(uint16_t bits) { return sycl::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// To nearest, ties to even: half of the last kept bit is added, and one less if that bit is 0. NaN becomes a quiet one.
inline uint16_t narrow_bf16(float value) {
    const uint32_t bits = sycl::bit_cast<uint32_t>(value);
    if (is_nan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40u);
    return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

inline float load(const FloatArray& from, int64_t at) {
    if (from.dtype == Dtype::kFp32) return static_cast<const float*>(from.data)[at];
    if (from.dtype == Dtype::kBf16) return widen_bf16(static_cast<const uint16_t*>(from.data)[at]);
    return static_cast<float>(static_cast<const sycl::half*>(from.data)[at]);
}

inline void store(const FloatArray& to, int64_t at, float value) {
    if (to.dtype == Dtype::kFp32) {
        static_cast<float*>(to.data)[at] = value;
    } else if (to.dtype == Dtype::kBf16) {
        static_cast<uint16_t*>(to.data)[at] = narrow_bf16(value);
    } else {
        static_cast<sycl::half*>(to.data)[at] = static_cast<sycl::half>(value);
    }
}

// a / b for numbers that are not negative, in 32 bits where they fit: GPUs divide 64 bits in a long subroutine.
inline int64_t divide(int64_t a, int64_t b) {
    if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
    return a / b;
}

}  // namespace ds_xpu
