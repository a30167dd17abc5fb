// What the loops between the products of a decoder layer are given. Formulas:
// deepspeed/ops/transformer/decoder_layer.py.
#pragma once

#include <cstdint>

#include "activation/gated_args.h"

namespace ds_cpu {

// Numbers of a head that a sequence's loop keeps beside its stack.
constexpr int64_t kMostHeadDim = 512;

// A norm of each head, before it is turned.
struct HeadNorm {
    const float* weight;  // null: none
    const float* bias;
};

// Where the parts of one product for queries, keys and values go. Strides in elements.
struct HeadsArgs {
    int64_t kv_heads;
    int64_t group;  // heads that share a key-value head
    int64_t head_dim;
    int64_t width;         // numbers of a row of the product
    int64_t query_stride;  // in it, from the queries of one key-value head to those of the next
    int64_t key_first;
    int64_t value_first;
    int64_t pair_stride;  // from a key or value to the next
    int64_t half;         // pairs that turn; 0: none
    bool interleaved;
    bool centered;
    float eps;
    HeadNorm query_norm;
    HeadNorm key_norm;
    const float* cos;  // (sequences, half)
    const float* sin;
    const void* qkv;  // (sequences, width)
    void* q;          // (sequences, heads, head_dim)
    void* keys;       // of the new token, in the cache
    void* values;
    int64_t key_sequence, key_head;  // strides of the cache
    int64_t value_sequence, value_head;
};

enum class Activation : int64_t { kSilu, kGelu, kGeluTanh, kRelu };

struct ActivationArgs {
    int64_t cols;  // of the result
    bool gated;
    Activation form;
    const void* wide;  // (rows, cols), or (rows, gate and up of cols each)
    void* out;
};

}  // namespace ds_cpu
