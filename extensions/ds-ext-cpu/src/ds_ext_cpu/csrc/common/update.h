// What the optimizer operators share: lists of tensors checked together, and divided over threads as one piece of work.
// Their loops are in update_loops.h.
#pragma once

#include <cstdint>
#include <vector>

#include "common/check.h"
#include "common/half.h"
#include "common/parallel.h"

namespace ds_cpu {

// The data of a tensor with one of the floating dtypes; `data` is null where there is no tensor.
struct FloatArray {
    void* data = nullptr;
    Dtype dtype = Dtype::kFp32;
};

// Elements that one thread takes at a time: 20 KiB of fp32 Adam, so that a step over small tensors uses all threads.
constexpr int64_t kBlock = 1024;
// Below this many elements a step is done by one thread: waking others costs more.
constexpr int64_t kGrain = 32768;

static inline void* data_of(const Tensor& tensor) {
    void* data;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor.get(), &data));
    return data;
}

// A list of state tensors, under its argument's name.
struct StateList {
    const char* name;
    const std::vector<Tensor>& tensors;
};

// The lists of one operator call: `params`, and lists with a tensor for each of them. Every check names its argument.
class TensorLists {
  public:
    TensorLists(const char* op, const std::vector<Tensor>& params) : op_(op), params_(params) {
        for (size_t index = 0; index < params.size(); ++index) {
            check_on_host(argument("params", index), params[index]);
            check_contiguous(argument("params", index), params[index]);
        }
    }

    // One item for each parameter, without factors; every argument has been checked then, and nothing has changed yet.
    template <typename Item, typename... States>
    std::vector<Item> items(const std::vector<Tensor>& grads, const std::vector<Tensor>& copies, double grad_scale,
                            const States&... states) const {
        check_count("grads", grads);
        (check_count(states.name, states.tensors), ...);
        check_count("copies", copies, /*may_be_empty=*/true);
        std::vector<Item> items(params_.size());
        for (size_t index = 0; index < params_.size(); ++index) {
            Item& item = items[index];
            item.numel = params_[index].numel();
            item.param = array("params", params_[index], index);
            item.grad = beside("grads", grads, index);
            int number = 0;
            ((item.states[number++] = state(states.name, states.tensors, index)), ...);
            if (!copies.empty()) item.copy = beside("copies", copies, index);
            item.grad_scale = static_cast<float>(grad_scale);
        }
        return items;
    }

    // Where the counts of steps lie: 0-D, fp32.
    std::vector<float*> counts(const std::vector<Tensor>& steps) const {
        check_count("steps", steps);
        std::vector<float*> counts(steps.size());
        for (size_t index = 0; index < steps.size(); ++index) counts[index] = step(steps[index], index);
        return counts;
    }

    // Where an operator writes one fp32 number for each parameter: a 1-D tensor.
    float* numbers(const char* name, const Tensor& tensor) const {
        const Argument named{op_, name};
        check_on_host(named, tensor);
        check_contiguous(named, tensor);
        check_fp32(named, tensor);
        const int64_t count = static_cast<int64_t>(params_.size());
        if (tensor.dim() != 1 || tensor.size(0) != count) {
            refuse(named, shape_name(tensor), "shape (" + std::to_string(count) + "), one for each of params");
        }
        return static_cast<float*>(data_of(tensor));
    }

  private:
    void check_count(const char* name, const std::vector<Tensor>& tensors, bool may_be_empty = false) const {
        if (may_be_empty && tensors.empty()) return;
        check_same_count({op_, name}, tensors, params_.size(), "params");
    }

    // A tensor of any floating dtype with the parameter's shape.
    FloatArray beside(const char* name, const std::vector<Tensor>& tensors, size_t index) const {
        check_beside(name, tensors[index], index);
        return array(name, tensors[index], index);
    }

    // A state: fp32, with the parameter's shape.
    float* state(const char* name, const std::vector<Tensor>& tensors, size_t index) const {
        check_beside(name, tensors[index], index);
        check_fp32(argument(name, index), tensors[index]);
        return static_cast<float*>(data_of(tensors[index]));
    }

    float* step(const Tensor& step, size_t index) const {
        check_on_host(argument("steps", index), step);
        check_fp32(argument("steps", index), step);
        if (step.numel() != 1) refuse(argument("steps", index), shape_name(step), "one number, shape ()");
        return static_cast<float*>(data_of(step));
    }

    Argument argument(const char* name, size_t index) const { return {op_, name, static_cast<int64_t>(index)}; }

    FloatArray array(const char* name, const Tensor& tensor, size_t index) const {
        return {data_of(tensor), check_float(argument(name, index), tensor)};
    }

    void check_beside(const char* name, const Tensor& tensor, size_t index) const {
        check_on_host(argument(name, index), tensor);
        check_contiguous(argument(name, index), tensor);
        check_same_shape(argument(name, index), tensor, params_[index], "params");
    }

    const char* op_;
    const std::vector<Tensor>& params_;
};

// One parameter of an update: its tensors and the numbers of its formula.
template <int kStates, typename Factors>
struct UpdateItem {
    int64_t numel = 0;
    FloatArray param;
    FloatArray grad;
    float* states[kStates] = {};
    FloatArray copy;          // gets the new value, rounded; data null: none
    float grad_scale = 1.0f;  // the gradient is multiplied by it as it is read
    Factors by = {};
};

// Calls `work(item, begin, end)` for all elements of all items, blocks of them divided over torch's threads.
// `Item` has `int64_t numel`. A block's bounds do not depend on the number of threads.
template <typename Item, typename Work>
static inline void for_each_block(const std::vector<Item>& items, const Work& work) {
    std::vector<int64_t> first_block;  // of each item, and the end
    first_block.reserve(items.size() + 1);
    first_block.push_back(0);
    int64_t numel = 0;
    for (const Item& item : items) {
        numel += item.numel;
        first_block.push_back(first_block.back() + (item.numel + kBlock - 1) / kBlock);
    }
    // many small tensors make many blocks, but are little work
    const int64_t grain = numel <= kGrain ? first_block.back() : kGrain / kBlock;
    parallel_for(first_block.back(), grain, [&](int64_t begin, int64_t end) {
        size_t index = 0;
        while (begin < end) {
            while (first_block[index + 1] <= begin) ++index;
            const int64_t stop = end < first_block[index + 1] ? end : first_block[index + 1];
            const int64_t to = (stop - first_block[index]) * kBlock;
            const Item& item = items[index];
            work(item, (begin - first_block[index]) * kBlock, to < item.numel ? to : item.numel);
            begin = stop;
        }
    });
}

}  // namespace ds_cpu
