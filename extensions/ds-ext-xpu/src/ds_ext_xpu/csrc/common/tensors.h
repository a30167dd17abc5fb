// What operators that make new tensors share: contiguous inputs, results, rows, sizes of launches.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>

#include "common/check.h"

namespace ds_xpu {

// Work-items of a group in kernels that give each work-item an element.
constexpr int64_t kGroupSize = 256;

inline int64_t groups_for(int64_t num_items) { return (num_items + kGroupSize - 1) / kGroupSize; }

// Work-items for a group that walks over `count` elements together: no more than can all have one.
inline int64_t group_size_for(int64_t count) {
    int64_t size = 32;
    while (size < count && size < kGroupSize) size *= 2;
    return size;
}

// `tensor` itself, or a contiguous copy.
inline Tensor as_contiguous(const Tensor& tensor) {
    return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// A new contiguous tensor of the given sizes beside `model`; of its dtype unless another is named.
inline Tensor new_tensor(const Tensor& model, const std::vector<int64_t>& sizes,
                         std::optional<torch::headeronly::ScalarType> dtype = std::nullopt) {
    return torch::stable::new_empty(model, torch::headeronly::IntHeaderOnlyArrayRef(sizes.data(), sizes.size()), dtype);
}

inline std::vector<int64_t> sizes_of(const Tensor& tensor) {
    std::vector<int64_t> sizes(tensor.dim());
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) sizes[dim] = tensor.size(dim);
    return sizes;
}

// The last dimension as rows of `cols` elements.
struct Rows {
    int64_t count;
    int64_t cols;
};

inline Rows check_rows(const Argument& argument, const Tensor& x) {
    if (x.dim() == 0) refuse(argument, "a tensor without dimensions", "of one dimension or more");
    const int64_t cols = x.size(x.dim() - 1);
    return {cols == 0 ? 0 : x.numel() / cols, cols};
}

// A vector over the columns of `x` (weight, bias), contiguous; nothing where it was left out.
inline std::optional<Tensor> check_row(const Argument& argument, const std::optional<Tensor>& tensor, const Tensor& x,
                                       int64_t cols) {
    if (!tensor.has_value()) return std::nullopt;
    check_beside(argument, *tensor, x, "x");
    check_float(argument, *tensor);
    if (tensor->dim() != 1 || tensor->size(0) != cols) {
        refuse(argument, shape_name(*tensor), "(" + std::to_string(cols) + "), the last dimension of x");
    }
    return as_contiguous(*tensor);
}

inline FloatArray array_or_none(const Argument& argument, const std::optional<Tensor>& tensor) {
    return tensor.has_value() ? array_of(argument, *tensor) : FloatArray{};
}

}  // namespace ds_xpu
