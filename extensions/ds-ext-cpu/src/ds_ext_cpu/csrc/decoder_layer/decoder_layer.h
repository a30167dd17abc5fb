// A layer of a decoder for the newest token of each sequence: `ds_cpu::decoder_layer`. Formulas:
// deepspeed/ops/transformer/decoder_layer.py.
#pragma once

#include "attention/decode_args.h"
#include "common/aligned.h"
#include "common/rows.h"
#include "decoder_layer/decoder_layer_args.h"
#include "linear/linear.h"
#include "norm/norm_args.h"

namespace ds_cpu {

static const char* const kLayer = "decoder_layer";

using MaybeTensor = std::optional<Tensor>;

// [Note: numbers of a decoder layer]
// The whole numbers of the operator's argument `shape`, in this order; deepspeed/ops/transformer/decoder_layer.py has
// the same.
struct LayerShape {
    enum Part : int64_t { kWhole, kAttention, kMlp };
    int64_t heads, kv_heads, head_dim, layout, parallel, centered, interleaved, gated, activation, window, bits,
        input_bits, part, adds_input;

    explicit LayerShape(const std::vector<int64_t>& numbers) {
        if (numbers.size() != 14) refuse({kLayer, "shape"}, std::to_string(numbers.size()) + " numbers", "14");
        heads = numbers[0], kv_heads = numbers[1], head_dim = numbers[2], layout = numbers[3], parallel = numbers[4];
        centered = numbers[5], interleaved = numbers[6], gated = numbers[7], activation = numbers[8];
        window = numbers[9], bits = numbers[10], input_bits = numbers[11], part = numbers[12];
        adds_input = numbers[13];
        if (part < kWhole || part > (parallel != 0 ? kWhole : kMlp)) {
            refuse({kLayer, "shape"}, "part " + std::to_string(part), parallel != 0 ? "0" : "0 to 2");
        }
        if (kv_heads < 1 || heads < 1 || heads % kv_heads != 0) {
            refuse({kLayer, "shape"}, std::to_string(heads) + " heads and " + std::to_string(kv_heads) + " of keys",
                   "a multiple");
        }
        if (head_dim < 1 || head_dim > kMostHeadDim) {
            refuse({kLayer, "shape"}, "heads of " + std::to_string(head_dim), "1 to " + std::to_string(kMostHeadDim));
        }
        if (layout < 0 || layout > 1) refuse({kLayer, "shape"}, "layout " + std::to_string(layout), "0 or 1");
        if (activation < 0 || activation > (gated != 0 ? 2 : 3)) {
            refuse({kLayer, "shape"}, "activation " + std::to_string(activation), gated != 0 ? "0 to 2" : "0 to 3");
        }
    }
    int64_t width() const { return (heads + 2 * kv_heads) * head_dim; }
};

static HeldWeight layer_weight(const WeightNames& names, const Tensor& weight, const MaybeTensor& scales,
                               const MaybeTensor& zeros, const MaybeTensor& bias, const LayerShape& shape,
                               const Tensor& x, int64_t outs, int64_t cols) {
    if (!scales.has_value()) check_same_dtype({kLayer, names.weight}, weight, x, "x");
    HeldWeight held = scales.has_value() ? HeldWeight(names, weight, *scales, zeros, shape.bits, shape.input_bits)
                                         : HeldWeight(names, weight);
    if (held.outs() != outs || held.cols() != cols) {
        refuse({kLayer, names.weight}, shape_name(weight),
               "of " + std::to_string(outs) + " outputs and " + std::to_string(cols) + " inputs");
    }
    held.hold_bias(bias);
    return held;
}

static CacheArgs layer_cache(const char* name, const Tensor& cache, const Tensor& x, const LayerShape& shape,
                             int64_t length) {
    const Argument argument{kLayer, name};
    check_on_host(argument, cache);
    check_same_dtype(argument, cache, x, "x");
    if (cache.dim() != 4 || cache.size(0) != x.size(0) || cache.size(1) != shape.kv_heads ||
        cache.size(3) != shape.head_dim || cache.stride(3) != 1) {
        refuse(argument, shape_name(cache), "(B, kv_heads, max_tokens, D), its last dimension contiguous");
    }
    if (length < 0 || length >= cache.size(2)) {
        refuse({kLayer, "length"}, std::to_string(length), "from 0 to " + std::to_string(cache.size(2) - 1));
    }
    return {.data = cache.data_ptr(),
            .block_stride = cache.stride(0),
            .token_stride = cache.stride(2),
            .head_stride = cache.stride(1)};
}

static Tensor angles_of(const char* name, const Tensor& table, const Tensor& x, int64_t half) {
    const Argument argument{kLayer, name};
    check_on_host(argument, table);
    check_fp32(argument, table);
    if (table.dim() != 2 || table.size(0) != x.size(0) || table.size(1) != half) {
        refuse(argument, shape_name(table), "(B, R / 2), R at most D");
    }
    return as_contiguous(table);
}

// First tokens that are seen, one of each sequence.
static std::vector<int64_t> starts_of(const MaybeTensor& starts, int64_t sequences, int64_t length) {
    if (!starts.has_value()) return std::vector<int64_t>(sequences, 0);
    const Argument argument{kLayer, "starts"};
    check_on_host(argument, *starts);
    if (dtype_code(*starts) != aoti_torch_dtype_int64()) refuse(argument, dtype_name(dtype_code(*starts)), "int64");
    if (starts->dim() != 1 || starts->size(0) != sequences) refuse(argument, shape_name(*starts), "(B)");
    const Tensor dense = as_contiguous(*starts);
    const auto* from = static_cast<const int64_t*>(dense.data_ptr());
    for (int64_t sequence = 0; sequence < sequences; ++sequence) {
        if (from[sequence] < 0 || from[sequence] > length) {
            refuse({kLayer, "starts", sequence}, std::to_string(from[sequence]), "from 0 to " + std::to_string(length));
        }
    }
    return {from, from + sequences};
}

// The attention of q (B, heads, D) over tokens up to `length`, into `out` of its shape.
static void attend_to_cache(const LayerShape& shape, Dtype dtype, const CacheArgs& keys, const CacheArgs& values,
                            const std::vector<int64_t>& starts, int64_t length, float scale, const void* q, void* out) {
    const auto sequences = static_cast<int64_t>(starts.size());
    const std::vector<int64_t> lengths(sequences, length + 1);
    std::vector<int64_t> table(sequences), begins;
    std::vector<ChunkArgs> chunks;
    const int64_t oldest = shape.window > 0 ? std::max<int64_t>(0, length + 1 - shape.window) : 0;
    for (int64_t sequence = 0; sequence < sequences; ++sequence) {
        table[sequence] = sequence;
        for (int64_t head = 0; head < shape.kv_heads; ++head) {
            begins.push_back(static_cast<int64_t>(chunks.size()));
            for (int64_t first = std::max(oldest, starts[sequence]); first <= length; first += kChunkTokens) {
                chunks.push_back({.sequence = sequence,
                                  .kv_head = head,
                                  .first = first,
                                  .last = std::min(length + 1, first + kChunkTokens)});
            }
        }
    }
    begins.push_back(static_cast<int64_t>(chunks.size()));
    constexpr int64_t kWidest = 16;
    const int64_t group = shape.heads / shape.kv_heads;
    const int64_t padded_dim = (shape.head_dim + kWidest - 1) / kWidest * kWidest;
    const int64_t stride = (group * (2 * padded_dim + kTileTokens + 2) + kWidest - 1) / kWidest * kWidest;
    const auto num_chunks = static_cast<int64_t>(chunks.size());
    const AlignedFloats scratch(num_chunks * stride);
    const DecodeArgs args{.kv_heads = shape.kv_heads,
                          .group = group,
                          .queries = 1,
                          .head_dim = shape.head_dim,
                          .padded_dim = padded_dim,
                          .block_size = length + 1,
                          .table_stride = 1,
                          .window = shape.window,
                          .scale = scale,
                          .keys = keys,
                          .values = values,
                          .q = q,
                          .slopes = nullptr,
                          .lengths = lengths.data(),
                          .table = table.data(),
                          .chunks = chunks.data(),
                          .starts = begins.data(),
                          .scratch = scratch.data(),
                          .scratch_stride = stride,
                          .out = out};
    const auto attend = DS_CPU_BY_DTYPE(dtype, attend_chunks);
    parallel_for(num_chunks, grain_of_rows(2 * std::min(kChunkTokens, length + 1) * shape.head_dim),
                 [&](int64_t begin, int64_t end) { attend(args, begin, end); });
    const auto join = DS_CPU_BY_DTYPE(dtype, join_chunks);
    join(args, 0, sequences * shape.kv_heads);
}

// Rows of the working memory of a layer, in the type of x.
class Buffers {
  public:
    Buffers(int64_t rows, int64_t numbers, int64_t element)
        : memory_(rows * numbers * element / static_cast<int64_t>(sizeof(float)) + kParts * kPad),
          at_(reinterpret_cast<uint8_t*>(memory_.data())),
          element_(element),
          rows_(rows) {}
    void* take(int64_t cols) {
        uint8_t* const taken = at_;
        at_ += (rows_ * cols * element_ + 63) / 64 * 64;
        return taken;
    }

  private:
    static constexpr int64_t kParts = 12, kPad = 32;
    AlignedFloats memory_;
    uint8_t* at_;
    int64_t element_, rows_;
};

struct LayerNorms {
    FloatRow weight;
    FloatRow bias;
};

static void norm_into(Dtype dtype, const LayerNorms& norm, bool centered, float eps, int64_t rows, int64_t cols,
                      const void* x, const void* residual, void* sum, void* out) {
    const NormArgs args{.cols = cols,
                        .centered = centered,
                        .eps = eps,
                        .weight = norm.weight.data(),
                        .bias = norm.bias.data(),
                        .x = x,
                        .residual = residual,
                        .sum = sum,
                        .out = out};
    DS_CPU_BY_DTYPE(dtype, norm_rows)(args, 0, rows);
}

// NOLINTNEXTLINE: as many arguments as the schema has
static Tensor decoder_layer(Tensor x, Tensor k_cache, Tensor v_cache, int64_t length, MaybeTensor starts,
                            MaybeTensor cos, MaybeTensor sin, Tensor qkv, MaybeTensor qkv_scales, MaybeTensor qkv_zeros,
                            MaybeTensor qkv_bias, Tensor out, MaybeTensor out_scales, MaybeTensor out_zeros,
                            MaybeTensor out_bias, Tensor up, MaybeTensor up_scales, MaybeTensor up_zeros,
                            MaybeTensor up_bias, Tensor down, MaybeTensor down_scales, MaybeTensor down_zeros,
                            MaybeTensor down_bias, Tensor norm_attention, MaybeTensor norm_attention_bias,
                            MaybeTensor norm_mlp, MaybeTensor norm_mlp_bias, MaybeTensor norm_query,
                            MaybeTensor norm_query_bias, MaybeTensor norm_key, MaybeTensor norm_key_bias,
                            std::vector<int64_t> shape_numbers, double eps, double scale) {
    const Dtype dtype = check_float_on_host({kLayer, "x"}, x);
    if (dtype == Dtype::kFp16) refuse({kLayer, "x"}, "dtype float16", "float32 or bfloat16");
    if (x.dim() != 2 || x.size(0) < 1 || x.size(0) > kMostRows || x.size(1) < 1) {
        refuse({kLayer, "x"}, shape_name(x), "(B, features), B from 1 to " + std::to_string(kMostRows));
    }
    const LayerShape shape(shape_numbers);
    const int64_t rows = x.size(0), cols = x.size(1), context = shape.heads * shape.head_dim;
    const int64_t half = cos.has_value() && cos->dim() == 2 ? cos->size(1) : 0;
    if (cos.has_value() != sin.has_value()) refuse({kLayer, "sin"}, "one of cos and sin", "given with cos");
    if (2 * half > shape.head_dim) refuse({kLayer, "cos"}, shape_name(*cos), "(B, R / 2), R at most D");
    std::optional<Tensor> cosines, sines;
    if (cos.has_value()) cosines = angles_of("cos", *cos, x, half), sines = angles_of("sin", *sin, x, half);
    if (up.dim() != 2) refuse({kLayer, "up"}, shape_name(up), "(out, in)");
    const int64_t wide = up.size(0), inner = shape.gated != 0 ? wide / 2 : wide;
    const HeldWeight qkv_of = layer_weight({kLayer, "qkv", "qkv_scales", "qkv_zeros", "qkv_bias"}, qkv, qkv_scales,
                                           qkv_zeros, qkv_bias, shape, x, shape.width(), cols);
    const HeldWeight out_of = layer_weight({kLayer, "out", "out_scales", "out_zeros", "out_bias"}, out, out_scales,
                                           out_zeros, out_bias, shape, x, cols, context);
    const HeldWeight up_of = layer_weight({kLayer, "up", "up_scales", "up_zeros", "up_bias"}, up, up_scales, up_zeros,
                                          up_bias, shape, x, shape.gated != 0 ? 2 * inner : inner, cols);
    const HeldWeight down_of = layer_weight({kLayer, "down", "down_scales", "down_zeros", "down_bias"}, down,
                                            down_scales, down_zeros, down_bias, shape, x, cols, inner);
    const LayerNorms before{FloatRow({kLayer, "norm_attention"}, norm_attention, cols, 1.0f),
                            FloatRow({kLayer, "norm_attention_bias"}, norm_attention_bias, cols, 0.0f)};
    std::optional<LayerNorms> between;
    if (norm_mlp.has_value()) {
        between.emplace(LayerNorms{FloatRow({kLayer, "norm_mlp"}, norm_mlp, cols, 1.0f),
                                   FloatRow({kLayer, "norm_mlp_bias"}, norm_mlp_bias, cols, 0.0f)});
    } else if (shape.parallel == 0) {
        refuse({kLayer, "norm_mlp"}, "none", "given, where the halves of the layer are not parallel");
    }
    if (norm_query.has_value() != norm_key.has_value())
        refuse({kLayer, "norm_key"}, "one norm", "given with norm_query");
    std::optional<LayerNorms> of_query, of_key;
    if (norm_query.has_value()) {
        of_query.emplace(LayerNorms{FloatRow({kLayer, "norm_query"}, norm_query, shape.head_dim, 1.0f),
                                    FloatRow({kLayer, "norm_query_bias"}, norm_query_bias, shape.head_dim, 0.0f)});
        of_key.emplace(LayerNorms{FloatRow({kLayer, "norm_key"}, norm_key, shape.head_dim, 1.0f),
                                  FloatRow({kLayer, "norm_key_bias"}, norm_key_bias, shape.head_dim, 0.0f)});
    }
    const CacheArgs keys = layer_cache("k_cache", k_cache, x, shape, length);
    const CacheArgs values = layer_cache("v_cache", v_cache, x, shape, length);
    const std::vector<int64_t> firsts = starts_of(starts, rows, length);
    const Tensor from = as_contiguous(x), result = new_tensor(x, sizes_of(x));
    const int64_t element = dtype == Dtype::kFp32 ? 4 : 2;
    Buffers buffers(rows, 4 * cols + shape.width() + 2 * context + wide + inner, element);
    void *normed = buffers.take(cols), *product = buffers.take(shape.width()), *queries = buffers.take(context),
         *attended = buffers.take(context), *added = buffers.take(cols), *total = buffers.take(cols),
         *both = buffers.take(wide), *narrowed = buffers.take(inner), *second = buffers.take(cols);
    const float small = static_cast<float>(eps);
    const bool centered = shape.centered != 0;
    const auto add = DS_CPU_BY_DTYPE(dtype, add_all);
    const auto finish = [&](const void* output) {
        if (shape.adds_input != 0) {
            add(output, from.data_ptr(), rows * cols, result.data_ptr());
        } else {
            std::memcpy(result.data_ptr(), output, rows * cols * element);
        }
        return result;
    };
    const auto mlp_into = [&](const void* input, void* output) {
        up_of.compute(dtype, input, rows, both);
        const ActivationArgs activation{.cols = inner,
                                        .gated = shape.gated != 0,
                                        .form = static_cast<Activation>(shape.activation),
                                        .wide = both,
                                        .out = narrowed};
        const auto activate = DS_CPU_BY_DTYPE(dtype, activate_blocks);
        const int64_t blocks = rows * ((inner + kGatedBlock - 1) / kGatedBlock);
        parallel_for(blocks, kGrainElements / kGatedBlock,
                     [&](int64_t begin, int64_t end) { activate(activation, begin, end); });
        down_of.compute(dtype, narrowed, rows, output);
    };
    if (shape.part == LayerShape::kMlp) {
        norm_into(dtype, *between, centered, small, rows, cols, from.data_ptr(), nullptr, nullptr, normed);
        mlp_into(normed, second);
        return finish(second);
    }
    norm_into(dtype, before, centered, small, rows, cols, from.data_ptr(), nullptr, nullptr, normed);
    qkv_of.compute(dtype, normed, rows, product);
    const int64_t group = shape.heads / shape.kv_heads, dim = shape.head_dim;
    const bool mixed = shape.layout != 0;  // queries, keys and values of a group side by side
    const auto new_token = [&](const CacheArgs& cache) {
        auto* begin = static_cast<uint8_t*>(const_cast<void*>(cache.data));
        return static_cast<void*>(begin + length * cache.token_stride * element);
    };
    const HeadsArgs heads{.kv_heads = shape.kv_heads,
                          .group = group,
                          .head_dim = dim,
                          .width = shape.width(),
                          .query_stride = (group + (mixed ? 2 : 0)) * dim,
                          .key_first = mixed ? group * dim : context,
                          .value_first = mixed ? (group + 1) * dim : context + shape.kv_heads * dim,
                          .pair_stride = mixed ? (group + 2) * dim : dim,
                          .half = half,
                          .interleaved = shape.interleaved != 0,
                          .centered = centered,
                          .eps = small,
                          .query_norm = {of_query.has_value() ? of_query->weight.data() : nullptr,
                                         of_query.has_value() ? of_query->bias.data() : nullptr},
                          .key_norm = {of_key.has_value() ? of_key->weight.data() : nullptr,
                                       of_key.has_value() ? of_key->bias.data() : nullptr},
                          .cos = cosines.has_value() ? static_cast<const float*>(cosines->data_ptr()) : nullptr,
                          .sin = sines.has_value() ? static_cast<const float*>(sines->data_ptr()) : nullptr,
                          .qkv = product,
                          .q = queries,
                          .keys = new_token(keys),
                          .values = new_token(values),
                          .key_sequence = keys.block_stride,
                          .key_head = keys.head_stride,
                          .value_sequence = values.block_stride,
                          .value_head = values.head_stride};
    DS_CPU_BY_DTYPE(dtype, place_heads)(heads, 0, rows);
    attend_to_cache(shape, dtype, keys, values, firsts, length, static_cast<float>(scale), queries, attended);
    out_of.compute(dtype, attended, rows, added);
    if (shape.part == LayerShape::kAttention) return finish(added);
    if (shape.parallel == 0) {
        norm_into(dtype, *between, centered, small, rows, cols, added, from.data_ptr(), total, normed);
        mlp_into(normed, second);
        add(second, total, rows * cols, result.data_ptr());
        return result;
    }
    if (between.has_value()) {
        norm_into(dtype, *between, centered, small, rows, cols, from.data_ptr(), nullptr, nullptr, normed);
    }
    mlp_into(normed, second);
    add(added, second, rows * cols, total);
    return finish(total);
}

}  // namespace ds_cpu
