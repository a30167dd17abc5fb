// Argument checks of the operators: what is wrong is named as in the operator's schema, with the value found.
// Host code; which device counts as ours is decided by registration.h.
#pragma once

#include <torch/csrc/stable/library.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "common/registration.h"

namespace ds {

using torch::stable::Tensor;

// Names an argument in an error: `grads` or, with an index, `grads[3]`.
struct Argument {
    const char* op;
    const char* name;
    int64_t index = -1;
};

[[noreturn]] static inline void refuse(const Argument& argument, const std::string& found,
                                       const std::string& expected) {
    std::string text = std::string("ds_cuda::") + argument.op + ": " + argument.name;
    if (argument.index >= 0) text += "[" + std::to_string(argument.index) + "]";
    throw std::runtime_error(text + ": found " + found + ", but it must be " + expected);
}

static inline int32_t dtype_code(const Tensor& tensor) {
    int32_t code;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
    return code;
}

static inline std::string dtype_name(int32_t code) {
    struct Known {
        int32_t code;
        const char* name;
    };
    const Known known[] = {
        {aoti_torch_dtype_float32(), "float32"}, {aoti_torch_dtype_bfloat16(), "bfloat16"},
        {aoti_torch_dtype_float16(), "float16"}, {aoti_torch_dtype_float64(), "float64"},
        {aoti_torch_dtype_int64(), "int64"},     {aoti_torch_dtype_int32(), "int32"},
        {aoti_torch_dtype_int16(), "int16"},     {aoti_torch_dtype_int8(), "int8"},
        {aoti_torch_dtype_uint8(), "uint8"},     {aoti_torch_dtype_bool(), "bool"},
    };
    for (const Known& one : known) {
        if (one.code == code) return std::string("dtype ") + one.name;
    }
    return "dtype number " + std::to_string(code);
}

static inline std::string shape_name(const Tensor& tensor) {
    std::string text = "shape (";
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
        text += (dim > 0 ? ", " : "") + std::to_string(tensor.size(dim));
    }
    return text + ")";
}

// On a device of ours, and strided (not sparse).
static inline void check_on_device(const Argument& argument, const Tensor& tensor) {
    if (!tensor.defined()) refuse(argument, "an undefined tensor", "a tensor");
    if (!is_ours(tensor)) refuse(argument, "a tensor on another device", std::string("on ") + kDeviceName);
    int32_t layout;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor.get(), &layout));
    if (layout != aoti_torch_layout_strided()) refuse(argument, "a sparse tensor", "dense");
}

// On the very device of another argument's tensor, which `model_name` names and which was checked before.
static inline void check_beside(const Argument& argument, const Tensor& tensor, const Tensor& model,
                                const char* model_name) {
    check_on_device(argument, tensor);
    const int32_t found = tensor.get_device_index(), wanted = model.get_device_index();
    if (found != wanted) {
        refuse(argument, std::string("a tensor on ") + kDeviceName + ":" + std::to_string(found),
               std::string("on ") + kDeviceName + ":" + std::to_string(wanted) + " as " + model_name + " is");
    }
}

static inline void check_contiguous(const Argument& argument, const Tensor& tensor) {
    if (!tensor.is_contiguous()) refuse(argument, "a tensor that is not contiguous", "contiguous");
}

// fp32, bf16 or fp16.
static inline Dtype check_float(const Argument& argument, const Tensor& tensor) {
    const int32_t code = dtype_code(tensor);
    if (code == aoti_torch_dtype_float32()) return Dtype::kFp32;
    if (code == aoti_torch_dtype_bfloat16()) return Dtype::kBf16;
    if (code == aoti_torch_dtype_float16()) return Dtype::kFp16;
    refuse(argument, dtype_name(code), "float32, bfloat16 or float16");
}

static inline void check_fp32(const Argument& argument, const Tensor& tensor) {
    const int32_t code = dtype_code(tensor);
    if (code != aoti_torch_dtype_float32()) refuse(argument, dtype_name(code), "float32");
}

// The dtype of another argument's tensor, which `model_name` names.
static inline void check_same_dtype(const Argument& argument, const Tensor& tensor, const Tensor& model,
                                    const char* model_name) {
    if (dtype_code(tensor) != dtype_code(model)) {
        refuse(argument, dtype_name(dtype_code(tensor)), dtype_name(dtype_code(model)) + " as " + model_name + " has");
    }
}

// The shape of another argument's tensor, which `model_name` names.
static inline void check_same_shape(const Argument& argument, const Tensor& tensor, const Tensor& model,
                                    const char* model_name) {
    bool same = tensor.dim() == model.dim();
    for (int64_t dim = 0; same && dim < model.dim(); ++dim) same = tensor.size(dim) == model.size(dim);
    if (!same) refuse(argument, shape_name(tensor), shape_name(model) + " as in " + model_name);
}

// As many tensors as the list that `model_name` names.
static inline void check_same_count(const Argument& argument, const std::vector<Tensor>& tensors, size_t count,
                                    const char* model_name) {
    if (tensors.size() != count) {
        refuse(argument, std::to_string(tensors.size()) + " tensors",
               std::to_string(count) + ", one for each of " + model_name);
    }
}

}  // namespace ds
