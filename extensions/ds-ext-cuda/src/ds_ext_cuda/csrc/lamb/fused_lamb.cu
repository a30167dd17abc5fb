// LAMB over lists of tensors: `ds_cuda::lamb_step_`. Formula: deepspeed/ops/lamb/fused_lamb.py.
//
//     lamb_moments   a block for each chunk: updates the moments, leaves |p|^2 and |u|^2 of the chunk
//     lamb_ratios    a block for each tensor: adds its chunks in order, and writes the trust ratio
//     lamb_kernel    a block for each chunk: the step
//
// Sums have one order, whatever the GPU: a step gives the same bits each time.

#include <cmath>

#include "common/capture.h"
#include "common/reduce.h"
#include "common/registration.h"
#include "common/step_items.h"
#include "common/step_loop.h"
#include "common/tensors.h"

namespace ds {

struct LambShared {
    double min_coeff;
    double max_coeff;
    double* chunk_norms;  // two for each chunk of a launch: |p|^2, |u|^2
    float* coeffs;        // one for each parameter of the call
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float eps;
    float weight_decay;
    float lr;
    float grad_scale;
    bool eps_inside_sqrt;
};

struct LambOwn {
    float correction1;  // 1 - beta1^t
    float correction2;  // 1 - beta2^t
};

using LambItem = StepItem<2, LambOwn>;
using LambBatch = Batch<LambItem, LambShared>;

// LAMB for one element: first `update_moments`, then, with all moments done, `direction`.
struct LambRule {
    const LambShared& by;
    const LambOwn& own;

    __host__ __device__ __forceinline__ void update_moments(float grad, float& exp_avg, float& exp_avg_sq) const {
        exp_avg = lerp(exp_avg, grad, by.one_minus_beta1);
        exp_avg_sq = fmaf(by.one_minus_beta2 * grad, grad, exp_avg_sq * by.beta2);
    }

    __host__ __device__ __forceinline__ float direction(float param, float exp_avg, float exp_avg_sq) const {
        const float second = exp_avg_sq / own.correction2;
        const float denominator = by.eps_inside_sqrt ? sqrtf(second + by.eps) : sqrtf(second) + by.eps;
        return fmaf(param, by.weight_decay, exp_avg / own.correction1 / denominator);
    }
};

// The trust ratio |p| / |u| between its bounds; 1 where either norm is 0.
__host__ __device__ __forceinline__ float trust_ratio(double param_squares, double direction_squares, double min_coeff,
                                                      double max_coeff) {
    const double param = sqrt(param_squares), direction = sqrt(direction_squares);
    if (!(param > 0.0 && direction > 0.0)) return 1.0f;
    const double ratio = param / direction;
    return static_cast<float>(ratio < min_coeff ? min_coeff : ratio > max_coeff ? max_coeff : ratio);
}

// A thread adds at most 32 squares in fp32; from there on sums are fp64.
struct MomentsWork {
    const LambItem& item;
    const LambRule& rule;
    float param_squares = 0.0f;
    float direction_squares = 0.0f;

    template <int N>
    __device__ __forceinline__ void run(int64_t at) {
        StepNumbers<N, 2> numbers;
        numbers.template read_from<true>(item, at);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            rule.update_moments(numbers.grad[i] * rule.by.grad_scale, numbers.states[0][i], numbers.states[1][i]);
            const float direction = rule.direction(numbers.param[i], numbers.states[0][i], numbers.states[1][i]);
            param_squares = fmaf(numbers.param[i], numbers.param[i], param_squares);
            direction_squares = fmaf(direction, direction, direction_squares);
        }
        numbers.write_states(item, at);
    }
};

struct LambWork {
    const LambItem& item;
    const LambRule& rule;
    float rate;

    template <int N>
    __device__ __forceinline__ void run(int64_t at) {
        StepNumbers<N, 2> numbers;
        numbers.template read_from<false>(item, at);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            numbers.param[i] -= rate * rule.direction(numbers.param[i], numbers.states[0][i], numbers.states[1][i]);
        }
        numbers.write_param(item, at);
    }
};

__global__ void __launch_bounds__(kChunkThreads) lamb_moments(const __grid_constant__ LambBatch batch) {
    const LambItem& item = batch.items[item_of_block(batch)];
    const LambRule rule{batch.by, item.own};
    MomentsWork work{item, rule};
    for_chunk(item, work);
    const double param_squares = block_reduce(static_cast<double>(work.param_squares), Sum{}, 0.0);
    const double direction_squares = block_reduce(static_cast<double>(work.direction_squares), Sum{}, 0.0);
    if (threadIdx.x == 0) {
        batch.by.chunk_norms[2 * static_cast<int64_t>(blockIdx.x)] = param_squares;
        batch.by.chunk_norms[2 * static_cast<int64_t>(blockIdx.x) + 1] = direction_squares;
    }
}

__global__ void __launch_bounds__(kChunkThreads) lamb_ratios(const __grid_constant__ LambBatch batch) {
    const int index = static_cast<int>(blockIdx.x);
    const int begin = batch.items[index].first_chunk;
    const int end = index + 1 < batch.num_items ? batch.items[index + 1].first_chunk : batch.num_chunks;
    double param_squares = 0.0, direction_squares = 0.0;
    for (int64_t chunk = begin + static_cast<int>(threadIdx.x); chunk < end; chunk += blockDim.x) {
        param_squares += batch.by.chunk_norms[2 * chunk];
        direction_squares += batch.by.chunk_norms[2 * chunk + 1];
    }
    param_squares = block_reduce(param_squares, Sum{}, 0.0);
    direction_squares = block_reduce(direction_squares, Sum{}, 0.0);
    if (threadIdx.x == 0) {
        batch.by.coeffs[batch.first_item + index] =
            trust_ratio(param_squares, direction_squares, batch.by.min_coeff, batch.by.max_coeff);
    }
}

__global__ void __launch_bounds__(kChunkThreads) lamb_kernel(const __grid_constant__ LambBatch batch) {
    const int index = item_of_block(batch);
    const LambItem& item = batch.items[index];
    const LambRule rule{batch.by, item.own};
    LambWork work{item, rule, batch.by.lr * batch.by.coeffs[batch.first_item + index]};
    for_chunk(item, work);
}

static void lamb_step(std::vector<Tensor> params, std::vector<Tensor> grads, std::vector<Tensor> exp_avgs,
                      std::vector<Tensor> exp_avg_sqs, std::vector<Tensor> steps, std::vector<Tensor> copies,
                      Tensor coeffs, double lr, double beta1, double beta2, double eps, double weight_decay,
                      bool bias_correction, bool eps_inside_sqrt, double min_coeff, double max_coeff,
                      double grad_scale) {
    const StepLists lists("lamb_step_", params);
    std::vector<LambItem> items =
        lists.items<LambItem>(grads, copies, StateList{"exp_avgs", exp_avgs}, StateList{"exp_avg_sqs", exp_avg_sqs});
    const std::vector<float*> counts = lists.counts(steps);
    float* const ratios = lists.numbers("coeffs", coeffs);
    if (params.empty()) return;
    const OnDevice device(params[0]);
    refuse_capture("lamb_step_", device.stream());
    int64_t num_chunks = 0;
    for (size_t index = 0; index < items.size(); ++index) {
        const double step = static_cast<double>(*counts[index] += 1.0f);
        items[index].own = {
            .correction1 = bias_correction ? static_cast<float>(1 - std::pow(beta1, step)) : 1.0f,
            .correction2 = bias_correction ? static_cast<float>(1 - std::pow(beta2, step)) : 1.0f,
        };
        num_chunks += num_chunks_of(items[index].numel);
    }
    // launches follow each other on one stream, so that they may share it
    const Tensor norms = new_tensor(exp_avgs[0], {2 * num_chunks}, torch::headeronly::ScalarType::Double);
    const LambShared by = {
        .min_coeff = min_coeff,
        .max_coeff = max_coeff,
        .chunk_norms = static_cast<double*>(norms.data_ptr()),
        .coeffs = ratios,
        .one_minus_beta1 = static_cast<float>(1 - beta1),
        .beta2 = static_cast<float>(beta2),
        .one_minus_beta2 = static_cast<float>(1 - beta2),
        .eps = static_cast<float>(eps),
        .weight_decay = static_cast<float>(weight_decay),
        .lr = static_cast<float>(lr),
        .grad_scale = static_cast<float>(grad_scale),
        .eps_inside_sqrt = eps_inside_sqrt,
    };
    for_each_batch(items, by, [&](const LambBatch& batch) {
        const dim3 chunks(batch.num_chunks), threads(kChunkThreads);
        launch(lamb_moments, chunks, threads, device.stream(), batch);
        launch(lamb_ratios, dim3(batch.num_items), threads, device.stream(), batch);
        launch(lamb_kernel, chunks, threads, device.stream(), batch);
    });
}

}  // namespace ds

STABLE_TORCH_LIBRARY_FRAGMENT(ds_cuda, m) {
    m.def(
        "lamb_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
        "Tensor(d!)[] steps, Tensor(e!)[] copies, Tensor(f!) coeffs, *, float lr, float beta1, float beta2, float eps, "
        "float weight_decay, bool bias_correction, bool eps_inside_sqrt, float min_coeff, float max_coeff, "
        "float grad_scale) -> ()");
}

DS_CUDA_LIBRARY_IMPL(m) { m.impl("lamb_step_", TORCH_BOX(&ds::lamb_step)); }
