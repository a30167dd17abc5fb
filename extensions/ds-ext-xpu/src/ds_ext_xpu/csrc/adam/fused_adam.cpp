// Adam and AdamW for tensors on the device: `ds_xpu::adam_step_`. Formulas: deepspeed/ops/adam/adam.py.

#include <cmath>
#include <limits>

#include "adam/adam_args.h"
#include "adam/adam_kernel.h"
#include "common/check.h"

namespace ds_xpu {

// The lists of one call, a tensor for each of `params`; `copies` may be empty.
struct AdamLists {
    const std::vector<Tensor>&params, &grads, &exp_avgs, &exp_avg_sqs, &steps, &copies;
};

static Argument argument(const char* name, int64_t index = -1) { return {"adam_step_", name, index}; }

static void check_count(const char* name, const std::vector<Tensor>& tensors, size_t count) {
    if (tensors.size() != count) {
        refuse(argument(name), std::to_string(tensors.size()) + " tensors",
               std::to_string(count) + ", one for each of params");
    }
}

// Contiguous, beside its parameter and of its shape.
static void check_like_param(const char* name, const Tensor& tensor, const Tensor& param, int64_t index) {
    check_beside(argument(name, index), tensor, param, "params");
    check_contiguous(argument(name, index), tensor);
    check_same_shape(argument(name, index), tensor, param, "params");
}

static float* state_of(const char* name, const Tensor& tensor, const Tensor& param, int64_t index) {
    check_like_param(name, tensor, param, index);
    check_fp32(argument(name, index), tensor);
    return static_cast<float*>(data_of(tensor));
}

// The count of steps lies on the host: an fp32 number.
static float* count_of(const Tensor& step, int64_t index) {
    check_place(argument("steps", index), step, aoti_torch_device_type_cpu(), "cpu");
    check_fp32(argument("steps", index), step);
    if (step.numel() != 1) refuse(argument("steps", index), shape_name(step), "one number, shape ()");
    return static_cast<float*>(data_of(step));
}

static AdamItem item_of(const AdamLists& lists, int64_t index) {
    const Tensor &param = lists.params[index], &grad = lists.grads[index];
    check_beside(argument("params", index), param, lists.params[0], "params[0]");
    check_contiguous(argument("params", index), param);
    check_like_param("grads", grad, param, index);
    const FloatArray params = array_of(argument("params", index), param);
    const FloatArray grads = array_of(argument("grads", index), grad);
    AdamItem item;
    item.numel = param.numel();
    item.exp_avg = state_of("exp_avgs", lists.exp_avgs[index], param, index);
    item.exp_avg_sq = state_of("exp_avg_sqs", lists.exp_avg_sqs[index], param, index);
    item.param = params.data;
    item.param_dtype = params.dtype;
    item.grad = grads.data;
    item.grad_dtype = grads.dtype;
    if (!lists.copies.empty()) {
        check_like_param("copies", lists.copies[index], param, index);
        const FloatArray copies = array_of(argument("copies", index), lists.copies[index]);
        item.copy = copies.data;
        item.copy_dtype = copies.dtype;
    }
    return item;
}

// One item for each parameter; every argument has been checked then, and nothing has changed yet.
static std::vector<AdamItem> items_of(const AdamLists& lists) {
    const size_t count = lists.params.size();
    check_count("grads", lists.grads, count);
    check_count("exp_avgs", lists.exp_avgs, count);
    check_count("exp_avg_sqs", lists.exp_avg_sqs, count);
    check_count("steps", lists.steps, count);
    if (!lists.copies.empty()) check_count("copies", lists.copies, count);
    std::vector<AdamItem> items(count);
    for (size_t index = 0; index < count; ++index) items[index] = item_of(lists, static_cast<int64_t>(index));
    for (size_t index = 0; index < count; ++index) count_of(lists.steps[index], static_cast<int64_t>(index));
    return items;
}

// Launches over as many items at a time as the arguments hold. `args` has everything but the items.
static void launch_all(sycl::queue& queue, const std::vector<AdamItem>& items, AdamArgs args) {
    int64_t num_groups = 0;
    args.num_items = 0;
    const auto flush = [&] {
        if (num_groups > 0) DS_XPU_LAUNCH(queue, adam_step_kernel, num_groups, 256, args);
        num_groups = args.num_items = 0;
    };
    for (const AdamItem& item : items) {
        const int64_t groups = (item.numel + kAdamChunk - 1) / kAdamChunk;
        if (groups == 0) continue;
        const bool fits = num_groups + groups <= std::numeric_limits<int32_t>::max();
        if (args.num_items == kTensorsPerLaunch || !fits) flush();
        args.items[args.num_items] = item;
        args.items[args.num_items++].first_group = static_cast<int32_t>(num_groups);
        num_groups += groups;
    }
    flush();
}

static void adam_step(std::vector<Tensor> params, std::vector<Tensor> grads, std::vector<Tensor> exp_avgs,
                      std::vector<Tensor> exp_avg_sqs, std::vector<Tensor> steps, std::vector<Tensor> copies, double lr,
                      double beta1, double beta2, double eps, double weight_decay, bool adam_w_mode,
                      bool bias_correction, bool maximize, double grad_scale) {
    std::vector<AdamItem> items = items_of({params, grads, exp_avgs, exp_avg_sqs, steps, copies});
    for (size_t index = 0; index < items.size(); ++index) {
        const double step = static_cast<double>(*count_of(steps[index], static_cast<int64_t>(index)) += 1.0f);
        // in double, as torch has them
        const double correction1 = bias_correction ? 1 - std::pow(beta1, step) : 1.0;
        const double correction2 = bias_correction ? 1 - std::pow(beta2, step) : 1.0;
        items[index].step_size = static_cast<float>(lr / correction1);
        items[index].bias_correction2_sqrt = static_cast<float>(std::sqrt(correction2));
    }
    AdamArgs args;
    args.grad_scale = static_cast<float>(maximize ? -grad_scale : grad_scale);
    args.one_minus_beta1 = static_cast<float>(1 - beta1);
    args.beta2 = static_cast<float>(beta2);
    args.one_minus_beta2 = static_cast<float>(1 - beta2);
    args.eps = static_cast<float>(eps);
    args.shrink = adam_w_mode ? static_cast<float>(1 - lr * weight_decay) : 1.0f;
    args.l2 = adam_w_mode ? 0.0f : static_cast<float>(weight_decay);
    if (!items.empty()) launch_all(current_queue(device_index_of(params[0])), items, args);
}

}  // namespace ds_xpu

STABLE_TORCH_LIBRARY_FRAGMENT(ds_xpu, m) {
    m.def(
        "adam_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
        "Tensor(d!)[] steps, Tensor(e!)[] copies, *, float lr, float beta1, float beta2, float eps, "
        "float weight_decay, bool adam_w_mode, bool bias_correction, bool maximize, float grad_scale) -> ()");
}

// Of every device, so that a tensor of another one is refused by name.
STABLE_TORCH_LIBRARY_IMPL(ds_xpu, CompositeExplicitAutograd, m) { m.impl("adam_step_", TORCH_BOX(&ds_xpu::adam_step)); }
