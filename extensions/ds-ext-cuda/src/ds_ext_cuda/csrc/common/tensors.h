// What operators that make new tensors share: contiguous inputs, results, rows, dispatch by dtype. Host code.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <limits>
#include <optional>
#include <utility>

#include "common/check.h"
#include "common/device.h"
#include "common/launch.h"
#include "common/rows.h"

namespace ds {

// Calls `act` with a value of the C++ type of `dtype`: `by_dtype(dtype, [&](auto one) { using T = decltype(one); ...
// })`.
template <typename Act>
void by_dtype(Dtype dtype, Act&& act) {
    if (dtype == Dtype::kFp32) {
        act(float{});
    } else if (dtype == Dtype::kBf16) {
        act(Bf16{});
    } else {
        act(Fp16{});
    }
}

static inline Dtype check_float_on_device(const Argument& argument, const Tensor& tensor) {
    check_on_device(argument, tensor);
    return check_float(argument, tensor);
}

// `tensor` itself, or a contiguous copy.
static inline Tensor as_contiguous(const Tensor& tensor) {
    return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// A new contiguous tensor of the given sizes; of the model's dtype unless another is named.
static inline Tensor new_tensor(const Tensor& model, const std::vector<int64_t>& sizes,
                                std::optional<torch::headeronly::ScalarType> dtype = std::nullopt) {
    return torch::stable::new_empty(model, torch::headeronly::IntHeaderOnlyArrayRef(sizes.data(), sizes.size()), dtype);
}

static inline std::vector<int64_t> sizes_of(const Tensor& tensor) {
    std::vector<int64_t> sizes(tensor.dim());
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) sizes[dim] = tensor.size(dim);
    return sizes;
}

template <typename T>
const T* data_of(const Tensor& tensor) {
    return static_cast<const T*>(tensor.data_ptr());
}

// The last dimension as rows of `cols` elements.
struct Rows {
    int64_t count;
    int64_t cols;
};

static inline Rows check_rows(const Argument& argument, const Tensor& x) {
    if (x.dim() == 0) refuse(argument, "a tensor without dimensions", "of one dimension or more");
    const int64_t cols = x.size(x.dim() - 1);
    return {cols == 0 ? 0 : x.numel() / cols, cols};
}

// A vector over the columns of x (weight, bias), contiguous, and the tensor that holds it.
struct HeldVector {
    std::optional<Tensor> tensor;
    FloatVector vector = {nullptr, Dtype::kFp32};
};

static inline HeldVector check_vector(const Argument& argument, const std::optional<Tensor>& tensor, int64_t cols,
                                      const Tensor& x) {
    if (!tensor.has_value()) return {};
    check_beside(argument, *tensor, x, "x");
    const Dtype dtype = check_float(argument, *tensor);
    if (tensor->dim() != 1 || tensor->size(0) != cols) {
        refuse(argument, shape_name(*tensor), "(" + std::to_string(cols) + "), the last dimension of x");
    }
    HeldVector held = {as_contiguous(*tensor), {nullptr, dtype}};
    held.vector.data = held.tensor->data_ptr();
    return held;
}

static inline int64_t divide_up(int64_t count, int64_t by) { return (count + by - 1) / by; }

// As many blocks as there are pieces of work; the hardware takes 2^31 - 1 in one dimension.
static inline dim3 grid_of(const Argument& argument, int64_t num_blocks) {
    if (num_blocks > std::numeric_limits<int32_t>::max()) {
        refuse(argument, std::to_string(num_blocks) + " blocks of work", "at most 2^31 - 1");
    }
    return dim3(static_cast<unsigned>(num_blocks));
}

}  // namespace ds
