// What the optimizer operators share on the host: lists of tensors checked together. The
// device's side is step_loop.h.
#pragma once

#include <cstdint>
#include <vector>

#include "common/batches.h"
#include "common/check.h"
#include "common/device.h"
#include "common/numbers.h"

namespace ds {

// Elements that one thread reads at once: 16 bytes of a half, two times 16 of fp32.
constexpr int kStepWide = 8;

// One parameter of an update. `Own`: the numbers of its formula that other parameters do not share.
template <int kStates, typename Own>
struct StepItem {
    int64_t numel = 0;
    void* param = nullptr;
    const void* grad = nullptr;
    float* states[kStates] = {};
    void* copy = nullptr;     // gets the new value, rounded; null: none
    int32_t first_chunk = 0;  // of this launch
    Dtype param_dtype : 8 = Dtype::kFp32;
    Dtype grad_dtype : 8 = Dtype::kFp32;
    Dtype copy_dtype : 8 = Dtype::kFp32;
    uint32_t is_aligned : 8 = 0;  // all of its tensors begin at a multiple of 16 bytes
    Own own = {};
};

// A list of state tensors, under its argument's name.
struct StateList {
    const char* name;
    const std::vector<Tensor>& tensors;
};

// The lists of one operator call: `params`, and lists with a tensor for each of them. Every check names its argument.
class StepLists {
  public:
    StepLists(const char* op, const std::vector<Tensor>& params) : op_(op), params_(params) {
        for (size_t index = 0; index < params.size(); ++index) check_beside_first("params", params[index], index);
    }

    // One item for each parameter, without its own numbers; every argument has been checked then.
    template <typename Item, typename... States>
    std::vector<Item> items(const std::vector<Tensor>& grads, const std::vector<Tensor>& copies,
                            const States&... states) const {
        check_count("grads", grads);
        (check_count(states.name, states.tensors), ...);
        if (!copies.empty()) check_count("copies", copies);
        std::vector<Item> items(params_.size());
        for (size_t index = 0; index < params_.size(); ++index) {
            Item& item = items[index];
            item.numel = params_[index].numel();
            item.param = params_[index].data_ptr();
            item.param_dtype = check_float(argument("params", index), params_[index]);
            item.grad_dtype = check_like_param("grads", grads[index], index);
            item.grad = grads[index].data_ptr();
            int number = 0;
            ((item.states[number++] = state(states.name, states.tensors[index], index)), ...);
            if (!copies.empty()) {
                item.copy_dtype = check_like_param("copies", copies[index], index);
                item.copy = copies[index].data_ptr();
            }
            item.is_aligned = are_aligned(item);
        }
        return items;
    }

    // Where the counts of steps lie: 0-D, fp32, in host memory, so that a step waits for nothing.
    std::vector<float*> counts(const std::vector<Tensor>& steps) const {
        check_count("steps", steps);
        std::vector<float*> counts(steps.size());
        for (size_t index = 0; index < steps.size(); ++index) {
            const Argument named = argument("steps", index);
            if (!steps[index].defined() || !steps[index].is_cpu()) refuse(named, "a tensor elsewhere", "on the cpu");
            check_fp32(named, steps[index]);
            if (steps[index].numel() != 1) refuse(named, shape_name(steps[index]), "one number, shape ()");
            counts[index] = static_cast<float*>(steps[index].data_ptr());
        }
        return counts;
    }

    // Where an operator writes one fp32 number for each parameter: a 1-D tensor on the device.
    float* numbers(const char* name, const Tensor& tensor) const {
        const Argument named{op_, name};
        check_on_device(named, tensor);
        check_contiguous(named, tensor);
        check_fp32(named, tensor);
        const int64_t count = static_cast<int64_t>(params_.size());
        if (tensor.dim() != 1 || tensor.size(0) != count) {
            refuse(named, shape_name(tensor), "shape (" + std::to_string(count) + "), one for each of params");
        }
        if (count > 0) check_beside(named, tensor, params_[0], "params[0]");
        return static_cast<float*>(tensor.data_ptr());
    }

  private:
    Argument argument(const char* name, size_t index) const { return {op_, name, static_cast<int64_t>(index)}; }

    void check_count(const char* name, const std::vector<Tensor>& tensors) const {
        check_same_count({op_, name}, tensors, params_.size(), "params");
    }

    void check_beside_first(const char* name, const Tensor& tensor, size_t index) const {
        check_on_device(argument(name, index), tensor);
        check_beside(argument(name, index), tensor, params_[0], "params[0]");
        check_contiguous(argument(name, index), tensor);
    }

    Dtype check_like_param(const char* name, const Tensor& tensor, size_t index) const {
        check_beside_first(name, tensor, index);
        check_same_shape(argument(name, index), tensor, params_[index], "params");
        return check_float(argument(name, index), tensor);
    }

    float* state(const char* name, const Tensor& tensor, size_t index) const {
        check_like_param(name, tensor, index);
        check_fp32(argument(name, index), tensor);
        return static_cast<float*>(tensor.data_ptr());
    }

    template <typename Item>
    static bool are_aligned(const Item& item) {
        uintptr_t bits = reinterpret_cast<uintptr_t>(item.param) | reinterpret_cast<uintptr_t>(item.grad) |
                         reinterpret_cast<uintptr_t>(item.copy);
        for (const float* state : item.states) bits |= reinterpret_cast<uintptr_t>(state);
        return bits % kAccessBytes == 0;
    }

    const char* op_;
    const std::vector<Tensor>& params_;
};

}  // namespace ds
