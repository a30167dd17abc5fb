// In place of SYCL: what the example kernel uses of it, one work item after the other, the last one first.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace sycl {

template <int kDims>
struct range {
    size_t size;
    explicit range(size_t size) : size(size) {}
};

template <int kDims>
struct id {
    size_t index;
    size_t operator[](int) const { return index; }
};

struct queue {
    template <typename Kernel>
    void parallel_for(range<1> items, const Kernel& kernel) {
        for (size_t left = items.size; left > 0; --left) kernel(id<1>{left - 1});
    }
};

using half = _Float16;

namespace ext::oneapi {

struct bfloat16 {
    uint16_t bits;
    bfloat16(float value) {
        const uint32_t wide = std::bit_cast<uint32_t>(value);
        bits = static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);  // to nearest, ties to even
    }
    operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};

}  // namespace ext::oneapi

}  // namespace sycl
