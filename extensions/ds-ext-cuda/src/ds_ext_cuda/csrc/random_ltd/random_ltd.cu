// Random layerwise token dropping (Yao et al., arXiv 2211.11586): sorts the tokens that a layer keeps, takes them out
// of the activations, and puts them back. Each is a copy: no arithmetic.

#include <cassert>

#include "common/registration.h"
#include "common/tensors.h"

namespace ds {

constexpr int kTokenThreads = 256;
constexpr int kTokensOfBlock = kTokenThreads / kWarpSize;  // one warp copies one token

// Each row of `to` is that of `from` in ascending order, one block for a row. A number's place is the count of those
// that stand before it, so that equal numbers have places of their own. Rows are short: n^2 / 256 comparisons by a
// thread.
__global__ void __launch_bounds__(kTokenThreads) sort_rows(const int32_t* from, int32_t* to, int cols) {
    from += static_cast<int64_t>(blockIdx.x) * cols;
    to += static_cast<int64_t>(blockIdx.x) * cols;
    for (int at = static_cast<int>(threadIdx.x); at < cols; at += kTokenThreads) {
        const int32_t number = from[at];
        int place = 0;
        for (int other = 0; other < cols; ++other) {
            const int32_t beside = from[other];
            place += beside < number || (beside == number && other < at);
        }
        to[place] = number;
    }
}

// A tensor [batch, tokens, hidden] or [tokens, batch, hidden], contiguous: how far apart two neighbours are, in units.
struct TokenLayout {
    int64_t batch_stride;
    int64_t token_stride;
};

// Token `indices[b][i]` of `whole` and token i of `part`, for all b and i: to the part (`kGather`) or from it.
template <typename Unit, bool kGather>
__global__ void __launch_bounds__(kTokenThreads)
    move_tokens(Unit* whole, TokenLayout in_whole, int num_tokens, Unit* part, TokenLayout in_part,
                const int32_t* indices, int64_t num_kept, int64_t num_moved, int num_units) {
    const int64_t number = static_cast<int64_t>(blockIdx.x) * kTokensOfBlock + threadIdx.x / kWarpSize;
    if (number >= num_moved) return;
    const int64_t row = number / num_kept, kept = number % num_kept;
    const int32_t token = indices[number];
    assert(token >= 0 && token < num_tokens);
    Unit* const one = whole + row * in_whole.batch_stride + token * in_whole.token_stride;
    Unit* const other = part + row * in_part.batch_stride + kept * in_part.token_stride;
    for (int at = static_cast<int>(threadIdx.x) % kWarpSize; at < num_units; at += kWarpSize) {
        if constexpr (kGather) {
            other[at] = one[at];
        } else {
            one[at] = other[at];
        }
    }
}

static void token_sort(Tensor indices, int64_t num_tokens) {
    const Argument named{"token_sort_", "indices"};
    check_on_device(named, indices);
    check_contiguous(named, indices);
    if (dtype_code(indices) != aoti_torch_dtype_int32()) refuse(named, dtype_name(dtype_code(indices)), "int32");
    const auto [count, cols] = check_rows(named, indices);
    if (cols > num_tokens) {
        refuse(named, std::to_string(cols) + " indices in a row", "at most num_tokens, " + std::to_string(num_tokens));
    }
    const OnDevice device(indices);
    const Tensor unsorted = torch::stable::clone(indices);
    launch(sort_rows, grid_of(named, count), dim3(kTokenThreads), device.stream(), data_of<int32_t>(unsorted),
           static_cast<int32_t*>(indices.data_ptr()), static_cast<int>(cols));
}

static TokenLayout layout_of(const Tensor& tensor, bool batch_first, int64_t num_units) {
    return batch_first ? TokenLayout{tensor.size(1) * num_units, num_units}
                       : TokenLayout{num_units, tensor.size(1) * num_units};
}

template <typename Unit, bool kGather>
static void launch_move(const Argument& named, const OnDevice& device, const Tensor& whole, const Tensor& part,
                        const Tensor& indices, bool batch_first) {
    const int64_t num_units = whole.size(2) * whole.element_size() / static_cast<int64_t>(sizeof(Unit));
    launch(move_tokens<Unit, kGather>, grid_of(named, divide_up(indices.numel(), kTokensOfBlock)), dim3(kTokenThreads),
           device.stream(), static_cast<Unit*>(whole.data_ptr()), layout_of(whole, batch_first, num_units),
           static_cast<int>(whole.size(batch_first ? 1 : 0)), static_cast<Unit*>(part.data_ptr()),
           layout_of(part, batch_first, num_units), data_of<int32_t>(indices), indices.size(1), indices.numel(),
           static_cast<int>(num_units));
}

// `whole` and `part` are contiguous and beside each other.
template <bool kGather>
static void move(const Argument& named, const Tensor& whole, const Tensor& part, const Tensor& indices,
                 bool batch_first) {
    const OnDevice device(whole);
    const int64_t token_bytes = whole.size(2) * whole.element_size();
    const uintptr_t bits = reinterpret_cast<uintptr_t>(whole.data_ptr()) |
                           reinterpret_cast<uintptr_t>(part.data_ptr()) | static_cast<uintptr_t>(token_bytes);
    if (bits % kAccessBytes == 0) {
        launch_move<Pack<float, 4>, kGather>(named, device, whole, part, indices, batch_first);
    } else if (bits % sizeof(float) == 0) {
        launch_move<float, kGather>(named, device, whole, part, indices, batch_first);
    } else if (bits % sizeof(uint16_t) == 0) {
        launch_move<uint16_t, kGather>(named, device, whole, part, indices, batch_first);
    } else {
        launch_move<uint8_t, kGather>(named, device, whole, part, indices, batch_first);
    }
}

static void check_indices(const char* op, const Tensor& activations, const Tensor& indices, const char* beside,
                          bool batch_first) {
    const Argument named{op, "indices"};
    if (activations.dim() != 3) refuse({op, beside}, shape_name(activations), "of three dimensions");
    check_beside(named, indices, activations, beside);
    if (dtype_code(indices) != aoti_torch_dtype_int32()) refuse(named, dtype_name(dtype_code(indices)), "int32");
    const int64_t batch = activations.size(batch_first ? 0 : 1);
    if (indices.dim() != 2 || indices.size(0) != batch) {
        refuse(named, shape_name(indices), "shape (" + std::to_string(batch) + ", kept tokens)");
    }
}

static Tensor token_gather(Tensor activations, Tensor indices, bool batch_first) {
    const Argument named{"token_gather", "activations"};
    check_on_device(named, activations);
    check_indices("token_gather", activations, indices, "activations", batch_first);
    const int64_t batch = indices.size(0), kept = indices.size(1), hidden = activations.size(2);
    const Tensor part =
        batch_first ? new_tensor(activations, {batch, kept, hidden}) : new_tensor(activations, {kept, batch, hidden});
    move<true>(named, as_contiguous(activations), part, as_contiguous(indices), batch_first);
    return part;
}

static void token_scatter(Tensor all_activations, Tensor layer_activations, Tensor indices, bool batch_first) {
    const char* const op = "token_scatter_";
    const Argument named{op, "all_activations"}, layer{op, "layer_activations"};
    check_on_device(named, all_activations);
    check_contiguous(named, all_activations);
    check_indices(op, all_activations, indices, "all_activations", batch_first);
    check_beside(layer, layer_activations, all_activations, "all_activations");
    check_same_dtype(layer, layer_activations, all_activations, "all_activations");
    const int64_t batch = indices.size(0), kept = indices.size(1), hidden = all_activations.size(2);
    const std::vector<int64_t> wanted =
        batch_first ? std::vector<int64_t>{batch, kept, hidden} : std::vector<int64_t>{kept, batch, hidden};
    if (sizes_of(layer_activations) != wanted) {
        refuse(layer, shape_name(layer_activations),
               "shape (" + std::to_string(wanted[0]) + ", " + std::to_string(wanted[1]) + ", " +
                   std::to_string(wanted[2]) + ")");
    }
    move<false>(named, all_activations, as_contiguous(layer_activations), as_contiguous(indices), batch_first);
}

}  // namespace ds

STABLE_TORCH_LIBRARY_FRAGMENT(ds_cuda, m) {
    m.def("token_sort_(Tensor(a!) indices, int num_tokens) -> ()");
    m.def("token_gather(Tensor activations, Tensor indices, bool batch_first) -> Tensor");
    m.def(
        "token_scatter_(Tensor(a!) all_activations, Tensor layer_activations, Tensor indices, bool batch_first) -> ()");
}

DS_CUDA_LIBRARY_IMPL(m) {
    m.impl("token_sort_", TORCH_BOX(&ds::token_sort));
    m.impl("token_gather", TORCH_BOX(&ds::token_gather));
    m.impl("token_scatter_", TORCH_BOX(&ds::token_scatter));
}
