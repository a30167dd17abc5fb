// Many tensors into one and back: `ds_cuda::flatten` copies them behind each other into a new 1-D tensor, in one launch
// for a hundred of them; `ds_cuda::unflatten` gives views of such a tensor in their shapes, and copies nothing.

#include "common/batches.h"
#include "common/registration.h"
#include "common/tensors.h"

namespace ds {

// One tensor to copy, in units of `unit_bytes`: the widest access that its addresses and its size allow.
struct CopyItem {
    int64_t numel = 0;
    const void* from = nullptr;
    void* to = nullptr;
    int32_t first_chunk = 0;
    int32_t unit_bytes = 1;
};
struct CopyShared {};
using CopyBatch = Batch<CopyItem, CopyShared>;

template <typename Unit>
__device__ __forceinline__ void copy_chunk(const CopyItem& item) {
    const auto [begin, count] = chunk_of_block(item);
    const Unit* __restrict__ const from = static_cast<const Unit*>(item.from) + begin;
    Unit* __restrict__ const to = static_cast<Unit*>(item.to) + begin;
#pragma unroll 4
    for (int at = static_cast<int>(threadIdx.x); at < count; at += kChunkThreads) to[at] = from[at];
}

__global__ void __launch_bounds__(kChunkThreads) flatten_kernel(const __grid_constant__ CopyBatch batch) {
    const CopyItem& item = batch.items[item_of_block(batch)];
    switch (item.unit_bytes) {
        case 16:
            return copy_chunk<Pack<float, 4>>(item);
        case 8:
            return copy_chunk<Pack<float, 2>>(item);
        case 4:
            return copy_chunk<float>(item);
        case 2:
            return copy_chunk<uint16_t>(item);
        default:
            return copy_chunk<uint8_t>(item);
    }
}

static CopyItem copy_of(const Tensor& from, char* to) {
    CopyItem item;
    const int64_t num_bytes = from.numel() * from.element_size();
    item.from = from.data_ptr();
    item.to = to;
    item.unit_bytes = kAccessBytes;
    const uintptr_t bits =
        reinterpret_cast<uintptr_t>(item.from) | reinterpret_cast<uintptr_t>(to) | static_cast<uintptr_t>(num_bytes);
    while (bits % item.unit_bytes != 0) item.unit_bytes /= 2;
    item.numel = num_bytes / item.unit_bytes;
    return item;
}

static Tensor flatten(std::vector<Tensor> tensors) {
    if (tensors.empty()) throw std::runtime_error("ds_cuda::flatten: found no tensors, but it must be 1 or more");
    std::vector<Tensor> sources;  // kept until their copies are queued
    int64_t numel = 0;
    for (size_t index = 0; index < tensors.size(); ++index) {
        const Argument named{"flatten", "tensors", static_cast<int64_t>(index)};
        check_on_device(named, tensors[index]);
        check_beside(named, tensors[index], tensors[0], "tensors[0]");
        check_same_dtype(named, tensors[index], tensors[0], "tensors[0]");
        numel += tensors[index].numel();
        sources.push_back(as_contiguous(tensors[index]));
    }
    const OnDevice device(tensors[0]);
    Tensor flat = new_tensor(tensors[0], {numel});
    std::vector<CopyItem> items;
    char* to = static_cast<char*>(flat.data_ptr());
    for (const Tensor& source : sources) {
        items.push_back(copy_of(source, to));
        to += source.numel() * source.element_size();
    }
    for_each_batch(items, CopyShared{}, [&](const CopyBatch& batch) {
        launch(flatten_kernel, dim3(batch.num_chunks), dim3(kChunkThreads), device.stream(), batch);
    });
    return flat;
}

static std::vector<Tensor> unflatten(Tensor flat, std::vector<Tensor> tensors) {
    const Argument named{"unflatten", "flat"};
    int64_t numel = 0;
    for (const Tensor& tensor : tensors) numel += tensor.numel();
    if (flat.dim() != 1 || flat.numel() < numel) {
        refuse(named, shape_name(flat), "of one dimension, with at least " + std::to_string(numel) + " elements");
    }
    std::vector<Tensor> views;
    int64_t begin = 0;
    for (const Tensor& tensor : tensors) {
        Tensor piece = torch::stable::narrow(flat, 0, begin, tensor.numel());
        const std::vector<int64_t> sizes = sizes_of(tensor);
        views.push_back(
            torch::stable::view(piece, torch::headeronly::IntHeaderOnlyArrayRef(sizes.data(), sizes.size())));
        begin += tensor.numel();
    }
    return views;
}

}  // namespace ds

STABLE_TORCH_LIBRARY_FRAGMENT(ds_cuda, m) {
    m.def("flatten(Tensor[] tensors) -> Tensor");
    m.def("unflatten(Tensor(a) flat, Tensor[] tensors) -> Tensor(a)[]");
}

DS_CUDA_LIBRARY_IMPL(m) { m.impl("flatten", TORCH_BOX(&ds::flatten)); }

// Made of views alone, so that every device, autograd and tensors without data have it at once.
STABLE_TORCH_LIBRARY_IMPL(ds_cuda, CompositeImplicitAutograd, m) { m.impl("unflatten", TORCH_BOX(&ds::unflatten)); }
