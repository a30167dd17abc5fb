// What the loops of attention over a cache are given. Formulas: deepspeed/ops/transformer/decode_attention.py.
#pragma once

#include <cstdint>

namespace ds_cpu {

// [Note: attention in chunks]
// The tokens of a sequence and a key-value head are read in chunks of kChunkTokens, each by one thread for all queries
// of the heads that share it, with the running maximum and sum of M. Milakov and N. Gimelshein, arXiv 1805.02867. A
// second pass adds up the chunks of a query: so threads have equal work however long sequences are, and the result does
// not depend on their number.
constexpr int64_t kChunkTokens = 512;
// Tokens whose scores lie in the first cache between the products with keys and those with values.
constexpr int64_t kTileTokens = 64;

// A cache of keys or values; strides in elements.
struct CacheArgs {
    const void* data;
    int64_t block_stride;
    int64_t token_stride;
    int64_t head_stride;
};

struct ChunkArgs {
    int64_t sequence;
    int64_t kv_head;
    int64_t first;  // token
    int64_t last;
};

struct DecodeArgs {
    int64_t kv_heads;
    int64_t group;    // heads that share a key-value head
    int64_t queries;  // of a head
    int64_t head_dim;
    int64_t padded_dim;  // to whole registers
    int64_t block_size;  // tokens; a cache without blocks is one block per sequence
    int64_t table_stride;
    int64_t window;  // 0: none
    float scale;
    CacheArgs keys;
    CacheArgs values;
    const void* q;            // (sequences, kv_heads, group * queries, head_dim)
    const float* slopes;      // (heads), or null
    const int64_t* lengths;   // (sequences)
    const int64_t* table;     // (sequences, table_stride)
    const ChunkArgs* chunks;  // those of one sequence and head side by side
    const int64_t* starts;    // (sequences * kv_heads + 1) of the first chunk of each
    float* scratch;           // for each chunk: see the members below
    int64_t scratch_stride;
    void* out;  // as q

    int64_t rows() const { return group * queries; }
    // Of a chunk: queries, weighted sums of values, scores of a tile, greatest score, sum of weights.
    float* queries_of(int64_t chunk) const { return scratch + chunk * scratch_stride; }
    float* sums_of(int64_t chunk) const { return queries_of(chunk) + rows() * padded_dim; }
    float* scores_of(int64_t chunk) const { return sums_of(chunk) + rows() * padded_dim; }
    float* greatest_of(int64_t chunk) const { return scores_of(chunk) + rows() * kTileTokens; }
    float* totals_of(int64_t chunk) const { return greatest_of(chunk) + rows(); }
};

}  // namespace ds_cpu
