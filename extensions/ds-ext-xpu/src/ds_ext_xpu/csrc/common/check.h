// Argument checks of the operators: what is wrong is named as in the operator's schema, with the value found.
#pragma once

#include <torch/csrc/stable/library.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "common/device.h"
#include "common/dtype.h"

namespace ds_xpu {

using torch::stable::Tensor;

// Names an argument in an error: `grads` or, with an index, `grads[3]`.
struct Argument {
    const char* op;
    const char* name;
    int64_t index = -1;
};

[[noreturn]] inline void refuse(const Argument& argument, const std::string& found, const std::string& expected) {
    std::string text = std::string("ds_xpu::") + argument.op + ": " + argument.name;
    if (argument.index >= 0) text += "[" + std::to_string(argument.index) + "]";
    throw std::runtime_error(text + ": found " + found + ", but it must be " + expected);
}

inline int32_t dtype_code(const Tensor& tensor) {
    int32_t code;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
    return code;
}

inline int32_t device_type_of(const Tensor& tensor) {
    int32_t type;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
    return type;
}

inline int32_t device_index_of(const Tensor& tensor) {
    int32_t index;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &index));
    return index;
}

inline void* data_of(const Tensor& tensor) {
    void* data;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor.get(), &data));
    return data;
}

inline std::string dtype_name(int32_t code) {
    struct Known {
        int32_t code;
        const char* name;
    };
    const Known known[] = {
        {aoti_torch_dtype_float32(), "float32"}, {aoti_torch_dtype_bfloat16(), "bfloat16"},
        {aoti_torch_dtype_float16(), "float16"}, {aoti_torch_dtype_float64(), "float64"},
        {aoti_torch_dtype_int64(), "int64"},     {aoti_torch_dtype_int32(), "int32"},
        {aoti_torch_dtype_int8(), "int8"},       {aoti_torch_dtype_uint8(), "uint8"},
    };
    for (const Known& one : known) {
        if (one.code == code) return std::string("dtype ") + one.name;
    }
    return "dtype number " + std::to_string(code);
}

inline std::string shape_name(const Tensor& tensor) {
    std::string text = "shape (";
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
        text += (dim > 0 ? ", " : "") + std::to_string(tensor.size(dim));
    }
    return text + ")";
}

// In memory of a device of type `type` that `where` names, and strided (not sparse).
inline void check_place(const Argument& argument, const Tensor& tensor, int32_t type, const char* where) {
    if (!tensor.defined()) refuse(argument, "an undefined tensor", "a tensor");
    if (device_type_of(tensor) != type) refuse(argument, "a tensor on another device", std::string("on the ") + where);
    int32_t layout;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor.get(), &layout));
    if (layout != aoti_torch_layout_strided()) refuse(argument, "a sparse tensor", "dense");
}

inline void check_on_device(const Argument& argument, const Tensor& tensor) {
    check_place(argument, tensor, device_type(), kDeviceName);
}

// On the same device as the tensor that `model_name` names, whose device was checked.
inline void check_beside(const Argument& argument, const Tensor& tensor, const Tensor& model, const char* model_name) {
    check_on_device(argument, tensor);
    if (device_index_of(tensor) != device_index_of(model)) {
        refuse(argument, std::string("a tensor on ") + kDeviceName + ":" + std::to_string(device_index_of(tensor)),
               std::string("on ") + kDeviceName + ":" + std::to_string(device_index_of(model)) + " as " + model_name +
                   " is");
    }
}

inline void check_contiguous(const Argument& argument, const Tensor& tensor) {
    if (!tensor.is_contiguous()) refuse(argument, "a tensor that is not contiguous", "contiguous");
}

// fp32, bf16 or fp16.
inline Dtype check_float(const Argument& argument, const Tensor& tensor) {
    const int32_t code = dtype_code(tensor);
    if (code == aoti_torch_dtype_float32()) return Dtype::kFp32;
    if (code == aoti_torch_dtype_bfloat16()) return Dtype::kBf16;
    if (code == aoti_torch_dtype_float16()) return Dtype::kFp16;
    refuse(argument, dtype_name(code), "float32, bfloat16 or float16");
}

inline void check_fp32(const Argument& argument, const Tensor& tensor) {
    const int32_t code = dtype_code(tensor);
    if (code != aoti_torch_dtype_float32()) refuse(argument, dtype_name(code), "float32");
}

// The shape of another argument's tensor, which `model_name` names.
inline void check_same_shape(const Argument& argument, const Tensor& tensor, const Tensor& model,
                             const char* model_name) {
    bool same = tensor.dim() == model.dim();
    for (int64_t dim = 0; same && dim < model.dim(); ++dim) same = tensor.size(dim) == model.size(dim);
    if (!same) refuse(argument, shape_name(tensor), shape_name(model) + " as in " + model_name);
}

// The elements of a floating tensor.
inline FloatArray array_of(const Argument& argument, const Tensor& tensor) {
    return {data_of(tensor), check_float(argument, tensor)};
}

}  // namespace ds_xpu
