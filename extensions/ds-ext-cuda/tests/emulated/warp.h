// Barriers, and what the lanes of a warp tell each other.
#pragma once

#include <bit>
#include <cstring>
#include <source_location>
#include <stdexcept>
#include <string>

#include "block.h"

namespace ds_emulated {

using Place = std::source_location;

template <typename V>
uint64_t to_bits(V value) {
    static_assert(sizeof(V) <= sizeof(uint64_t), "CUDA shuffles at most 8 bytes");
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(V));
    return bits;
}

template <typename V>
V of_bits(uint64_t bits) {
    V value;
    std::memcpy(&value, &bits, sizeof(V));
    return value;
}

// The value of lane `source`, which must take part; of its own where `source` lies outside its `width` lanes.
template <typename V>
V from_lane(unsigned mask, V value, int source, bool inside, const Place& place) {
    const uint64_t* values = block().exchange(mask, to_bits(value), place);
    if (!inside) return value;
    if (!(mask >> source & 1)) {
        throw std::runtime_error(at(place) + ": reads lane " + std::to_string(source) + ", which is not in the mask");
    }
    return of_bits<V>(values[source]);
}

// Folds the values of the mask's lanes, lowest first.
template <typename V, typename Op>
V over_mask(unsigned mask, V value, Op op, const Place& place) {
    const uint64_t* values = block().exchange(mask, to_bits(value), place);
    V result = of_bits<V>(values[std::countr_zero(mask)]);
    for (int lane = std::countr_zero(mask) + 1; lane < kLanes; ++lane) {
        if (mask >> lane & 1) result = op(result, of_bits<V>(values[lane]));
    }
    return result;
}

inline int count_block(bool predicate, const Place& place) {
    block().barrier(predicate, place);
    int count = 0;
    for (int i = 0; i < block().num_threads(); ++i) count += block().thread(i).value != 0;
    block().barrier(predicate, place);  // nobody changes its value while others still count
    return count;
}

}  // namespace ds_emulated

inline void __syncthreads(ds_emulated::Place place = ds_emulated::Place::current()) {
    ds_emulated::block().barrier(0, place);
}
inline int __syncthreads_count(int predicate, ds_emulated::Place place = ds_emulated::Place::current()) {
    return ds_emulated::count_block(predicate != 0, place);
}
inline int __syncthreads_or(int predicate, ds_emulated::Place place = ds_emulated::Place::current()) {
    return ds_emulated::count_block(predicate != 0, place) != 0;
}
inline int __syncthreads_and(int predicate, ds_emulated::Place place = ds_emulated::Place::current()) {
    return ds_emulated::count_block(predicate == 0, place) == 0;
}
inline void __syncwarp(unsigned mask = 0xffffffffu, ds_emulated::Place place = ds_emulated::Place::current()) {
    ds_emulated::block().exchange(mask, 0, place);
}

template <typename V>
V __shfl_sync(unsigned mask, V value, int source, int width = 32,
              ds_emulated::Place place = ds_emulated::Place::current()) {
    const int base = ds_emulated::block().lane() / width * width;
    return ds_emulated::from_lane(mask, value, base + source % width, true, place);
}
template <typename V>
V __shfl_xor_sync(unsigned mask, V value, int turned, int width = 32,
                  ds_emulated::Place place = ds_emulated::Place::current()) {
    const int lane = ds_emulated::block().lane(), source = lane ^ turned;
    return ds_emulated::from_lane(mask, value, source, source < lane / width * width + width, place);
}
template <typename V>
V __shfl_up_sync(unsigned mask, V value, unsigned distance, int width = 32,
                 ds_emulated::Place place = ds_emulated::Place::current()) {
    const int lane = ds_emulated::block().lane(), source = lane - static_cast<int>(distance);
    return ds_emulated::from_lane(mask, value, source, source >= lane / width * width, place);
}
template <typename V>
V __shfl_down_sync(unsigned mask, V value, unsigned distance, int width = 32,
                   ds_emulated::Place place = ds_emulated::Place::current()) {
    const int lane = ds_emulated::block().lane(), source = lane + static_cast<int>(distance);
    return ds_emulated::from_lane(mask, value, source, source < lane / width * width + width, place);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, ds_emulated::Place place = ds_emulated::Place::current()) {
    const unsigned bit = predicate != 0 ? 1u << ds_emulated::block().lane() : 0u;
    return ds_emulated::over_mask(mask, bit, [](unsigned a, unsigned b) { return a | b; }, place);
}
inline int __any_sync(unsigned mask, int predicate, ds_emulated::Place place = ds_emulated::Place::current()) {
    return __ballot_sync(mask, predicate, place) != 0;
}
inline int __all_sync(unsigned mask, int predicate, ds_emulated::Place place = ds_emulated::Place::current()) {
    return __ballot_sync(mask, predicate, place) == mask;
}
template <typename V>
V __reduce_add_sync(unsigned mask, V value, ds_emulated::Place place = ds_emulated::Place::current()) {
    return ds_emulated::over_mask(mask, value, [](V a, V b) { return static_cast<V>(a + b); }, place);
}
template <typename V>
V __reduce_max_sync(unsigned mask, V value, ds_emulated::Place place = ds_emulated::Place::current()) {
    return ds_emulated::over_mask(mask, value, [](V a, V b) { return a > b ? a : b; }, place);
}
template <typename V>
V __reduce_min_sync(unsigned mask, V value, ds_emulated::Place place = ds_emulated::Place::current()) {
    return ds_emulated::over_mask(mask, value, [](V a, V b) { return a < b ? a : b; }, place);
}
