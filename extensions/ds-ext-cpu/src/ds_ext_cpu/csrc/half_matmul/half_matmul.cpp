// Products of bf16 and fp16 matrices on processors without instructions for them. torch computes such products element
// by element there; here they are products in fp32, of blocks, each rounded once. Operators of torch's own are
// replaced, for tensors of the dtypes that `enable` names; all others go to torch's kernel as before.
#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward_cpu_dispatch.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/baddbmm_cpu_dispatch.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <tuple>
#include <vector>

namespace {

using at::Scalar;
using at::Tensor;

// fp32 copies of a block's operands stay below this, unless one row or one matrix of a batch is larger.
constexpr int64_t kBlockBytes = int64_t{32} << 20;
// Below it torch reads a transposed matrix, as linear layers have, about as fast as memory gives it: one product per
// row.
constexpr int64_t kMinRows = 8;

std::atomic<bool> is_enabled_for_bf16{false};
std::atomic<bool> is_enabled_for_fp16{false};

std::atomic<bool>* flag_of(at::ScalarType dtype) {
    if (dtype == at::kBFloat16) return &is_enabled_for_bf16;
    return dtype == at::kHalf ? &is_enabled_for_fp16 : nullptr;
}

bool is_enabled(at::ScalarType dtype) {
    const auto* flag = flag_of(dtype);
    return flag != nullptr && flag->load(std::memory_order_relaxed);
}

// What torch's kernel multiplies quickly, or refuses with its own words, stays with it.
bool is_ours(const Tensor& left_MK, const Tensor& right_KN) {
    const auto dims = left_MK.dim();
    if (!is_enabled(left_MK.scalar_type()) || right_KN.scalar_type() != left_MK.scalar_type()) return false;
    if (right_KN.dim() != dims || left_MK.numel() == 0 || right_KN.numel() == 0) return false;
    if (left_MK.size(-1) != right_KN.size(-2) || (dims == 3 && left_MK.size(0) != right_KN.size(0))) return false;
    return left_MK.size(-2) >= kMinRows || right_KN.stride(-2) != 1;
}

// Whether the product can be written there as it comes. Otherwise torch resizes, or refuses.
bool fits(const Tensor& out, const Tensor& left, const Tensor& right, at::IntArrayRef sizes) {
    return out.scalar_type() == left.scalar_type() && out.sizes() == sizes && !out.is_alias_of(left) &&
           !out.is_alias_of(right);
}

int64_t block_of(int64_t row_numel) {
    const int64_t rows = kBlockBytes / (static_cast<int64_t>(sizeof(float)) * std::max<int64_t>(row_numel, 1));
    return std::max<int64_t>(rows, 1);
}

// out = left right, or beta added + alpha left right, where `added` has the sizes of `out`.
void multiply(const Tensor& out_MN, const Tensor& left_MK, const Tensor& right_KN,
              const std::optional<Tensor>& added_MN, const Scalar& beta, const Scalar& alpha) {
    const int64_t num_rows = left_MK.size(0), num_columns = right_KN.size(1), inner = left_MK.size(1);
    const int64_t columns = std::min(num_columns, block_of(inner)), rows = block_of(std::max(inner, columns));
    for (int64_t column = 0; column < num_columns; column += columns) {
        const int64_t width = std::min(columns, num_columns - column);
        const Tensor right = right_KN.narrow(1, column, width).to(at::kFloat);
        for (int64_t row = 0; row < num_rows; row += rows) {
            const int64_t height = std::min(rows, num_rows - row);
            const Tensor left = left_MK.narrow(0, row, height).to(at::kFloat);
            const Tensor out = out_MN.narrow(0, row, height).narrow(1, column, width);
            if (added_MN.has_value()) {
                const Tensor added = added_MN->narrow(0, row, height).narrow(1, column, width).to(at::kFloat);
                out.copy_(at::cpu::addmm(added, left, right, beta, alpha));
            } else {
                out.copy_(at::cpu::mm(left, right));
            }
        }
    }
}

void multiply_batch(const Tensor& out_BMN, const Tensor& left_BMK, const Tensor& right_BKN,
                    const std::optional<Tensor>& added_BMN, const Scalar& beta, const Scalar& alpha) {
    const int64_t num_matrices = left_BMK.size(0);
    const int64_t numel = std::max({left_BMK[0].numel(), right_BKN[0].numel(), out_BMN[0].numel()});
    const int64_t matrices = block_of(numel);
    for (int64_t first = 0; first < num_matrices; first += matrices) {
        const int64_t count = std::min(matrices, num_matrices - first);
        const auto part = [&](const Tensor& whole) { return whole.narrow(0, first, count); };
        const Tensor left = part(left_BMK).to(at::kFloat), right = part(right_BKN).to(at::kFloat);
        if (added_BMN.has_value()) {
            part(out_BMN).copy_(at::cpu::baddbmm(part(*added_BMN).to(at::kFloat), left, right, beta, alpha));
        } else {
            part(out_BMN).copy_(at::cpu::bmm(left, right));
        }
    }
}

std::vector<int64_t> sizes_of_product(const Tensor& left, const Tensor& right) {
    auto sizes = left.sizes().vec();
    sizes.back() = right.size(-1);
    return sizes;
}

// A term that torch would broadcast, as a bias is.
std::optional<Tensor> as_wide_as(const Tensor& added, at::IntArrayRef sizes, at::ScalarType dtype) {
    if (added.scalar_type() != dtype || !at::is_expandable_to(added.sizes(), sizes)) return std::nullopt;
    return added.expand(sizes);
}

// One body for all of them: the product of matrices, or of batches with `dims` 3, alone or added to a term. An `out`
// that is not defined is made. `torchs` gives the same by torch's own kernel.
template <typename Torchs>
Tensor& product(int64_t dims, const Tensor& left, const Tensor& right, std::optional<Tensor> added, const Scalar& beta,
                const Scalar& alpha, Tensor& out, Torchs&& torchs) {
    if (left.dim() != dims || !is_ours(left, right)) return torchs();
    const auto sizes = sizes_of_product(left, right);
    if (added.has_value()) {
        if (out.defined() && out.is_alias_of(*added) && !out.is_same(*added)) return torchs();
        added = as_wide_as(*added, sizes, left.scalar_type());
        if (!added.has_value()) return torchs();
    }
    if (!out.defined()) out = at::empty(sizes, left.options());
    if (!fits(out, left, right, sizes)) return torchs();
    (dims == 2 ? multiply : multiply_batch)(out, left, right, added, beta, alpha);
    return out;
}

Tensor mm(const Tensor& left, const Tensor& right) {
    Tensor out;
    return product(2, left, right, {}, 0, 1, out, [&]() -> Tensor& { return out = at::cpu::mm(left, right); });
}

Tensor& mm_out(const Tensor& left, const Tensor& right, Tensor& out) {
    return product(2, left, right, {}, 0, 1, out, [&]() -> Tensor& { return at::cpu::mm_outf(left, right, out); });
}

Tensor bmm(const Tensor& left, const Tensor& right) {
    Tensor out;
    return product(3, left, right, {}, 0, 1, out, [&]() -> Tensor& { return out = at::cpu::bmm(left, right); });
}

Tensor& bmm_out(const Tensor& left, const Tensor& right, Tensor& out) {
    return product(3, left, right, {}, 0, 1, out, [&]() -> Tensor& { return at::cpu::bmm_outf(left, right, out); });
}

Tensor addmm(const Tensor& added, const Tensor& left, const Tensor& right, const Scalar& beta, const Scalar& alpha) {
    Tensor out;
    return product(2, left, right, added, beta, alpha, out,
                   [&]() -> Tensor& { return out = at::cpu::addmm(added, left, right, beta, alpha); });
}

Tensor& addmm_out(const Tensor& added, const Tensor& left, const Tensor& right, const Scalar& beta, const Scalar& alpha,
                  Tensor& out) {
    return product(2, left, right, added, beta, alpha, out,
                   [&]() -> Tensor& { return at::cpu::addmm_outf(added, left, right, beta, alpha, out); });
}

Tensor& addmm_(Tensor& added, const Tensor& left, const Tensor& right, const Scalar& beta, const Scalar& alpha) {
    return product(2, left, right, added, beta, alpha, added,
                   [&]() -> Tensor& { return at::cpu::addmm_(added, left, right, beta, alpha); });
}

Tensor baddbmm(const Tensor& added, const Tensor& left, const Tensor& right, const Scalar& beta, const Scalar& alpha) {
    Tensor out;
    return product(3, left, right, added, beta, alpha, out,
                   [&]() -> Tensor& { return out = at::cpu::baddbmm(added, left, right, beta, alpha); });
}

Tensor& baddbmm_out(const Tensor& added, const Tensor& left, const Tensor& right, const Scalar& beta,
                    const Scalar& alpha, Tensor& out) {
    return product(3, left, right, added, beta, alpha, out,
                   [&]() -> Tensor& { return at::cpu::baddbmm_outf(added, left, right, beta, alpha, out); });
}

Tensor& baddbmm_(Tensor& added, const Tensor& left, const Tensor& right, const Scalar& beta, const Scalar& alpha) {
    return product(3, left, right, added, beta, alpha, added,
                   [&]() -> Tensor& { return at::cpu::baddbmm_(added, left, right, beta, alpha); });
}

// torch's forward of attention is quick; its backward multiplies in the dtype of its inputs.
std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& grad, const Tensor& query, const Tensor& key,
                                                      const Tensor& value, const Tensor& out, const Tensor& logsumexp,
                                                      double dropout, bool is_causal, const std::optional<Tensor>& mask,
                                                      std::optional<double> scale) {
    const auto backward = [&](const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value,
                              const Tensor& out, const std::optional<Tensor>& mask) {
        return at::cpu::_scaled_dot_product_flash_attention_for_cpu_backward(grad, query, key, value, out, logsumexp,
                                                                             dropout, is_causal, mask, scale);
    };
    const auto dtype = query.scalar_type();
    if (!is_enabled(dtype)) return backward(grad, query, key, value, out, mask);
    const auto wide = [](const Tensor& tensor) { return tensor.to(at::kFloat); };
    std::optional<Tensor> wide_mask = mask;
    if (mask.has_value() && mask->scalar_type() == dtype) wide_mask = wide(*mask);
    auto [query_grad, key_grad, value_grad] =
        backward(wide(grad), wide(query), wide(key), wide(value), wide(out), wide_mask);
    return {query_grad.to(dtype), key_grad.to(dtype), value_grad.to(dtype)};
}

class Silent : public c10::WarningHandler {
  public:
    void process(const c10::Warning&) override {}
};

// Once per process, and for good: torch has no way back to a kernel of its own that was replaced, but ours calls it.
void replace() {
    Silent silent;  // torch warns of each kernel that is replaced, as it is here on purpose
    const c10::WarningUtils::WarningHandlerGuard guard(&silent);
    static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
    library->impl("mm", TORCH_FN(mm));
    library->impl("mm.out", TORCH_FN(mm_out));
    library->impl("bmm", TORCH_FN(bmm));
    library->impl("bmm.out", TORCH_FN(bmm_out));
    library->impl("addmm", TORCH_FN(addmm));
    library->impl("addmm.out", TORCH_FN(addmm_out));
    library->impl("addmm_", TORCH_FN(addmm_));
    library->impl("baddbmm", TORCH_FN(baddbmm));
    library->impl("baddbmm.out", TORCH_FN(baddbmm_out));
    library->impl("baddbmm_", TORCH_FN(baddbmm_));
    library->impl("_scaled_dot_product_flash_attention_for_cpu_backward", TORCH_FN(attention_backward));
}

void enable(at::ScalarType dtype, bool is_on) {
    auto* flag = flag_of(dtype);
    TORCH_CHECK_VALUE(flag != nullptr, "products in fp32 were asked for ", dtype,
                      "; they are for bfloat16 and float16");
    static const bool is_replaced = (replace(), true);
    (void)is_replaced;
    flag->store(is_on);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(ds_cpu, library) {
    library.def("enable_half_matmul(ScalarType dtype, bool is_on) -> ()", &enable);
    library.def("is_half_matmul_enabled(ScalarType dtype) -> bool", &is_enabled);
}
