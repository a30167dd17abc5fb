// Attention of the newest tokens over a cache in host memory: `ds_cpu::decode_attention`. Formulas:
// deepspeed/ops/transformer/decode_attention.py.

#include "attention/decode_args.h"
#include "common/aligned.h"
#include "common/half.h"
#include "common/isa.h"
#include "common/rows.h"

#define DS_CPU_LOOPS "attention/attention_loops.h"
#include "common/each_isa.h"

namespace ds_cpu {

static const char* const kOp = "decode_attention";

// int32 or int64, on the host, copied as int64.
static std::vector<int64_t> integers(const char* name, const Tensor& tensor) {
    const Argument argument{kOp, name};
    check_on_host(argument, tensor);
    const int32_t code = dtype_code(tensor);
    const Tensor dense = as_contiguous(tensor);
    if (code == aoti_torch_dtype_int64()) {
        const auto* from = static_cast<const int64_t*>(dense.data_ptr());
        return {from, from + dense.numel()};
    }
    if (code != aoti_torch_dtype_int32()) refuse(argument, dtype_name(code), "int32 or int64");
    const auto* from = static_cast<const int32_t*>(dense.data_ptr());
    return {from, from + dense.numel()};
}

struct Layout {
    int64_t kv_heads;
    int64_t block_size;
    int64_t num_blocks;
};

static Layout layout_of(const char* name, const Tensor& cache, const Tensor& q, bool paged) {
    const Argument argument{kOp, name};
    check_on_host(argument, cache);
    check_same_dtype(argument, cache, q, "q");
    const int64_t heads_dim = paged ? 2 : 1;
    const bool fits = cache.dim() == 4 && cache.size(3) == q.size(3) && cache.size(heads_dim) > 0 &&
                      q.size(1) % cache.size(heads_dim) == 0 && (paged || cache.size(0) == q.size(0));
    if (!fits) {
        refuse(argument, shape_name(cache),
               std::string(paged ? "(num_blocks, block_size, kv_heads, D)" : "(B, kv_heads, max_tokens, D)") +
                   ", kv_heads a divisor of q's heads, with q of " + shape_name(q));
    }
    return {cache.size(heads_dim), cache.size(paged ? 1 : 2), cache.size(0)};
}

static CacheArgs cache_args(const Tensor& cache, bool paged) {
    return {.data = cache.data_ptr(),
            .block_stride = cache.stride(0),
            .token_stride = cache.stride(paged ? 1 : 2),
            .head_stride = cache.stride(paged ? 2 : 1)};
}

// The table of blocks, checked where it is used: block `b` of sequence `b` where the cache has no blocks.
static std::vector<int64_t> table_of(const std::optional<Tensor>& block_table, const std::vector<int64_t>& lengths,
                                     int64_t queries, const Layout& layout, int64_t* table_stride) {
    const auto sequences = static_cast<int64_t>(lengths.size());
    std::vector<int64_t> table;
    *table_stride = 1;
    if (block_table.has_value()) {
        table = integers("block_table", *block_table);
        if (block_table->dim() != 2 || block_table->size(0) != sequences) {
            refuse({kOp, "block_table"}, shape_name(*block_table), "(" + std::to_string(sequences) + ", blocks)");
        }
        *table_stride = block_table->size(1);
    } else {
        for (int64_t sequence = 0; sequence < sequences; ++sequence) table.push_back(sequence);
    }
    for (int64_t sequence = 0; sequence < sequences; ++sequence) {
        const int64_t length = lengths[sequence], capacity = *table_stride * layout.block_size;
        if (length < queries || length > capacity) {
            refuse({kOp, "lengths", sequence}, std::to_string(length),
                   "from " + std::to_string(queries) + " to " + std::to_string(capacity));
        }
        for (int64_t block = 0; block * layout.block_size < length; ++block) {
            const int64_t entry = table[sequence * *table_stride + block];
            if (entry < 0 || entry >= layout.num_blocks) {
                refuse({kOp, "block_table", sequence}, "block " + std::to_string(entry),
                       "from 0 to " + std::to_string(layout.num_blocks - 1));
            }
        }
    }
    return table;
}

struct Chunks {
    std::vector<ChunkArgs> all;
    std::vector<int64_t> starts;
};

static Chunks chunks_of(const std::vector<int64_t>& lengths, int64_t kv_heads, int64_t queries, int64_t window) {
    Chunks chunks;
    for (size_t sequence = 0; sequence < lengths.size(); ++sequence) {
        const int64_t length = lengths[sequence];
        const int64_t oldest = window > 0 ? std::max<int64_t>(0, length - queries + 1 - window) : 0;
        for (int64_t head = 0; head < kv_heads; ++head) {
            chunks.starts.push_back(static_cast<int64_t>(chunks.all.size()));
            for (int64_t first = oldest; first < length; first += kChunkTokens) {
                chunks.all.push_back({.sequence = static_cast<int64_t>(sequence),
                                      .kv_head = head,
                                      .first = first,
                                      .last = std::min(length, first + kChunkTokens)});
            }
        }
    }
    chunks.starts.push_back(static_cast<int64_t>(chunks.all.size()));
    return chunks;
}

// The last dimension has to be contiguous; a cache of another layout is copied.
static Tensor readable(const Tensor& cache) { return cache.stride(3) == 1 ? cache : as_contiguous(cache); }

static Tensor decode_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor lengths, double scale,
                               std::optional<Tensor> block_table, std::optional<Tensor> alibi_slopes,
                               std::optional<int64_t> window) {
    const Dtype dtype = check_float_on_host({kOp, "q"}, q);
    if (q.dim() != 4 || q.numel() == 0) refuse({kOp, "q"}, shape_name(q), "(B, heads, Q, D), not empty");
    const bool paged = block_table.has_value();
    const Layout layout = layout_of("k_cache", k_cache, q, paged);
    layout_of("v_cache", v_cache, q, paged);
    check_same_shape({kOp, "v_cache"}, v_cache, k_cache, "k_cache");
    if (window.has_value() && *window < 1) refuse({kOp, "window"}, std::to_string(*window), "1 or more");
    const int64_t sequences = q.size(0), heads = q.size(1), queries = q.size(2), head_dim = q.size(3);
    const std::vector<int64_t> counts = integers("lengths", lengths);
    if (lengths.dim() != 1 || lengths.size(0) != sequences) {
        refuse({kOp, "lengths"}, shape_name(lengths), "(" + std::to_string(sequences) + ")");
    }
    int64_t table_stride;
    const std::vector<int64_t> table = table_of(block_table, counts, queries, layout, &table_stride);
    std::optional<Tensor> slopes;
    if (alibi_slopes.has_value()) {
        check_on_host({kOp, "alibi_slopes"}, *alibi_slopes);
        check_fp32({kOp, "alibi_slopes"}, *alibi_slopes);
        if (alibi_slopes->dim() != 1 || alibi_slopes->size(0) != heads) {
            refuse({kOp, "alibi_slopes"}, shape_name(*alibi_slopes), "(" + std::to_string(heads) + ")");
        }
        slopes = as_contiguous(*alibi_slopes);
    }
    const Tensor from = as_contiguous(q), keys = readable(k_cache), values = readable(v_cache);
    const Tensor out = new_tensor(q, sizes_of(q));
    const Chunks chunks = chunks_of(counts, layout.kv_heads, queries, window.value_or(0));
    constexpr int64_t kWidest = 16;
    const int64_t rows = heads / layout.kv_heads * queries;
    const int64_t padded_dim = (head_dim + kWidest - 1) / kWidest * kWidest;
    const int64_t stride = (rows * (2 * padded_dim + kTileTokens + 2) + kWidest - 1) / kWidest * kWidest;
    const auto num_chunks = static_cast<int64_t>(chunks.all.size());
    const AlignedFloats scratch(num_chunks * stride);
    const DecodeArgs args{.kv_heads = layout.kv_heads,
                          .group = heads / layout.kv_heads,
                          .queries = queries,
                          .head_dim = head_dim,
                          .padded_dim = padded_dim,
                          .block_size = layout.block_size,
                          .table_stride = table_stride,
                          .window = window.value_or(0),
                          .scale = static_cast<float>(scale),
                          .keys = cache_args(keys, paged),
                          .values = cache_args(values, paged),
                          .q = from.data_ptr(),
                          .slopes = slopes.has_value() ? static_cast<const float*>(slopes->data_ptr()) : nullptr,
                          .lengths = counts.data(),
                          .table = table.data(),
                          .chunks = chunks.all.data(),
                          .starts = chunks.starts.data(),
                          .scratch = scratch.data(),
                          .scratch_stride = stride,
                          .out = out.data_ptr()};
    const int64_t longest = std::min(kChunkTokens, *std::max_element(counts.begin(), counts.end()));
    const auto attend = DS_CPU_BY_DTYPE(dtype, attend_chunks);
    parallel_for(num_chunks, grain_of_rows(2 * longest * head_dim),
                 [&](int64_t begin, int64_t end) { attend(args, begin, end); });
    const auto join = DS_CPU_BY_DTYPE(dtype, join_chunks);
    const int64_t joined = sequences * layout.kv_heads;
    parallel_for(joined, grain_of_rows(rows * head_dim * num_chunks / joined),
                 [&](int64_t begin, int64_t end) { join(args, begin, end); });
    return out;
}

}  // namespace ds_cpu

STABLE_TORCH_LIBRARY_FRAGMENT(ds_cpu, m) {
    m.def(
        "decode_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor lengths, float scale, Tensor? block_table, "
        "Tensor? alibi_slopes, int? window) -> Tensor");
}

// Of every device, so that a tensor of another one is refused by name.
STABLE_TORCH_LIBRARY_IMPL(ds_cpu, CompositeExplicitAutograd, m) {
    m.impl("decode_attention", TORCH_BOX(&ds_cpu::decode_attention));
}
