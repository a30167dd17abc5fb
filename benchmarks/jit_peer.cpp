// AdamW over one fp32 tensor, bound as most PyTorch extensions are: torch/extension.h and pybind11. Compiled by
// benchmarks/jit.py through torch.utils.cpp_extension.load, for the cost of that way.
#include <torch/extension.h>

#include <cmath>

static void adam_step_(torch::Tensor param, torch::Tensor grad, torch::Tensor exp_avg, torch::Tensor exp_avg_sq,
                       int64_t step, double lr, double beta1, double beta2, double eps, double weight_decay) {
    TORCH_CHECK(param.is_contiguous() && param.scalar_type() == torch::kFloat, "param: a contiguous fp32 tensor");
    float* p = param.data_ptr<float>();
    const float* g = grad.data_ptr<float>();
    float* m = exp_avg.data_ptr<float>();
    float* v = exp_avg_sq.data_ptr<float>();
    const float correction1 = 1.0 - std::pow(beta1, step), correction2 = std::sqrt(1.0 - std::pow(beta2, step));
    at::parallel_for(0, param.numel(), 1 << 16, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            p[i] -= float(lr * weight_decay) * p[i];
            m[i] = float(beta1) * m[i] + float(1 - beta1) * g[i];
            v[i] = float(beta2) * v[i] + float(1 - beta2) * g[i] * g[i];
            p[i] -= float(lr) / correction1 * m[i] / (std::sqrt(v[i]) / correction2 + float(eps));
        }
    });
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("adam_step_", &adam_step_); }
