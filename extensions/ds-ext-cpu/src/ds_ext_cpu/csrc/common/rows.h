// What operators that make new tensors share: contiguous inputs, results, fp32 copies of small vectors, dtype dispatch.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "common/check.h"
#include "common/half.h"
#include "common/parallel.h"

namespace ds_cpu {

// Elements below which waking another thread costs more than it saves.
constexpr int64_t kGrainElements = 32768;

// The loop of the pass in use for the elements' type: `DS_CPU_BY_DTYPE(dtype, gelu_range)`.
#define DS_CPU_BY_DTYPE(dtype, loop)                                           \
    ((dtype) == ::ds_cpu::Dtype::kFp32   ? DS_CPU_CHOOSE(loop<float>)          \
     : (dtype) == ::ds_cpu::Dtype::kBf16 ? DS_CPU_CHOOSE(loop<::ds_cpu::Bf16>) \
                                         : DS_CPU_CHOOSE(loop<::ds_cpu::Fp16>))

static inline Dtype check_float_on_host(const Argument& argument, const Tensor& tensor) {
    check_on_host(argument, tensor);
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

// The dtype of another argument's tensor, which `model_name` names.
static inline void check_same_dtype(const Argument& argument, const Tensor& tensor, const Tensor& model,
                                    const char* model_name) {
    if (dtype_code(tensor) != dtype_code(model)) {
        refuse(argument, dtype_name(dtype_code(tensor)), dtype_name(dtype_code(model)) + " as " + model_name + " has");
    }
}

// A vector over the columns (weight, bias) as fp32: where it lies, or a copy; of `missing` where it was left out.
class FloatRow {
  public:
    FloatRow(const Argument& argument, const std::optional<Tensor>& tensor, int64_t cols, float missing) {
        if (!tensor.has_value()) {
            own_.reset(new float[cols]);
            std::fill_n(own_.get(), cols, missing);
            data_ = own_.get();
            return;
        }
        const Dtype dtype = check_float_on_host(argument, *tensor);
        if (tensor->dim() != 1 || tensor->size(0) != cols) {
            refuse(argument, shape_name(*tensor), "(" + std::to_string(cols) + "), the last dimension of x");
        }
        held_ = as_contiguous(*tensor);
        if (dtype == Dtype::kFp32) {
            data_ = static_cast<const float*>(held_->data_ptr());
            return;
        }
        own_.reset(new float[cols]);
        data_ = own_.get();
        if (dtype == Dtype::kBf16) {
            copy(static_cast<const Bf16*>(held_->data_ptr()), cols);
        } else {
            copy(static_cast<const Fp16*>(held_->data_ptr()), cols);
        }
    }

    const float* data() const { return data_; }

  private:
    template <typename T>
    void copy(const T* from, int64_t cols) {
        for (int64_t i = 0; i < cols; ++i) own_[i] = widen(from[i]);
    }

    std::optional<Tensor> held_;
    std::unique_ptr<float[]> own_;
    const float* data_ = nullptr;
};

static inline int64_t grain_of_rows(int64_t cols) {
    return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(cols, 1));
}

}  // namespace ds_cpu
