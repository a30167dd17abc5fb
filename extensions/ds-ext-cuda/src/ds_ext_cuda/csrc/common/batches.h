// One launch over many tensors: as many items as its arguments can hold, of any sizes, cut into chunks. A block has one
// chunk of one item.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "common/launch.h"

namespace ds {

// Elements that one block has.
constexpr int kChunk = 8192;
constexpr int kChunkThreads = 256;
// Arguments that every GPU takes in one launch.
constexpr size_t kArgumentBytes = 4096;

static inline int64_t num_chunks_of(int64_t numel) { return (numel + kChunk - 1) / kChunk; }

// `Item` has `int64_t numel` and `int32_t first_chunk`, which is written here. `Shared`: what all items have in common.
template <typename Item, typename Shared>
struct Batch {
    static constexpr int kMaxItems =
        static_cast<int>((kArgumentBytes - sizeof(Shared) - 4 * sizeof(int32_t)) / sizeof(Item));

    Shared by;
    int32_t num_items = 0;
    int32_t num_chunks = 0;
    int32_t first_item = 0;  // its place in the whole list
    Item items[kMaxItems];
};

// Calls `launch_one(batch)` for all items, as few times as their number allows. Host code.
template <typename Item, typename Shared, typename LaunchOne>
void for_each_batch(const std::vector<Item>& items, const Shared& by, const LaunchOne& launch_one) {
    using Launch = Batch<Item, Shared>;
    static_assert(sizeof(Launch) <= kArgumentBytes && Launch::kMaxItems > 0, "too large for one launch");
    Launch batch;
    batch.by = by;
    for (size_t first = 0; first < items.size(); first += Launch::kMaxItems) {
        batch.first_item = static_cast<int32_t>(first);
        batch.num_items = static_cast<int32_t>(std::min<size_t>(Launch::kMaxItems, items.size() - first));
        int64_t num_chunks = 0;
        for (int32_t index = 0; index < batch.num_items; ++index) {
            batch.items[index] = items[first + index];
            batch.items[index].first_chunk = static_cast<int32_t>(num_chunks);
            num_chunks += num_chunks_of(items[first + index].numel);
            if (num_chunks > INT32_MAX) throw std::runtime_error("ds_cuda: more elements than a grid can have");
        }
        batch.num_chunks = static_cast<int32_t>(num_chunks);
        launch_one(batch);
    }
}

// Which item this block's chunk is of; items stand in the order of their chunks.
template <typename Launch>
__device__ __forceinline__ int item_of_block(const Launch& batch) {
    const int32_t chunk = static_cast<int32_t>(blockIdx.x);
    int low = 0, high = batch.num_items - 1;
    while (low < high) {  // the last one that begins at or before it: an empty item begins where the next one does
        const int middle = (low + high + 1) / 2;
        if (batch.items[middle].first_chunk <= chunk) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

// Where this block's chunk begins in its item, and how many elements it has.
struct ChunkOfItem {
    int64_t begin;
    int count;
};

template <typename Item>
__device__ __forceinline__ ChunkOfItem chunk_of_block(const Item& item) {
    const int64_t begin = static_cast<int64_t>(static_cast<int32_t>(blockIdx.x) - item.first_chunk) * kChunk;
    const int64_t left = item.numel - begin;
    return {begin, left < kChunk ? static_cast<int>(left) : kChunk};
}

}  // namespace ds
