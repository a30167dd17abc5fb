// Loops between the products of a decoder layer.

// One head of one token, normed and turned.
template <typename T>
DS_CPU_INLINE void place_head(const HeadsArgs& args, const T* from, int64_t sequence, const HeadNorm& norm, T* out) {
    T normed[kMostHeadDim];
    if (norm.weight != nullptr) {
        const NormArgs of_head{.cols = args.head_dim,
                               .centered = args.centered,
                               .eps = args.eps,
                               .weight = norm.weight,
                               .bias = norm.bias,
                               .x = from,
                               .residual = nullptr,
                               .sum = nullptr,
                               .out = normed};
        norm_rows<T>(of_head, 0, 1);
        from = normed;
    }
    const float *cos = args.cos + sequence * args.half, *sin = args.sin + sequence * args.half;
    if (args.half > 0 && args.interleaved) turn_neighbours(from, cos, sin, args.half, out);
    if (args.half > 0 && !args.interleaved) turn_halves(from, cos, sin, args.half, out);
    const int64_t turned = 2 * args.half;
    std::memcpy(out + turned, from + turned, (args.head_dim - turned) * sizeof(T));
}

// Queries side by side, keys and values into the cache, of sequences [first, last).
template <typename T>
void place_heads(const HeadsArgs& args, int64_t first, int64_t last) {
    const int64_t dim = args.head_dim;
    for (int64_t sequence = first; sequence < last; ++sequence) {
        const T* row = static_cast<const T*>(args.qkv) + sequence * args.width;
        T* q = static_cast<T*>(args.q) + sequence * args.kv_heads * args.group * dim;
        for (int64_t head = 0; head < args.kv_heads; ++head) {
            const T* queries = row + head * args.query_stride;
            for (int64_t one = 0; one < args.group; ++one, q += dim) {
                place_head<T>(args, queries + one * dim, sequence, args.query_norm, q);
            }
            T* key = static_cast<T*>(args.keys) + sequence * args.key_sequence + head * args.key_head;
            T* value = static_cast<T*>(args.values) + sequence * args.value_sequence + head * args.value_head;
            place_head<T>(args, row + args.key_first + head * args.pair_stride, sequence, args.key_norm, key);
            std::memcpy(value, row + args.value_first + head * args.pair_stride, dim * sizeof(T));
        }
    }
}

template <typename T>
static void activated_block(const T* __restrict from, int64_t count, Activation form, T* __restrict out) {
    float block[kGatedBlock];
    for (int64_t i = 0; i < count; ++i) block[i] = widen(from[i]);
    switch (form) {
        case Activation::kSilu:
            silu_block(block, count);
            break;
        case Activation::kGelu:
            gelu_row<false>(static_cast<const float*>(block), nullptr, count, GeluCurves<float>::kErf, block);
            break;
        case Activation::kGeluTanh:
            gelu_row<false>(static_cast<const float*>(block), nullptr, count, GeluCurves<float>::kTanh, block);
            break;
        case Activation::kRelu:
            for (int64_t i = 0; i < count; ++i) block[i] = block[i] < 0.0f ? 0.0f : block[i];
            break;
    }
    for (int64_t i = 0; i < count; ++i) out[i] = narrow<T>(block[i]);
}

// Blocks [first, last) of all rows.
template <typename T>
void activate_blocks(const ActivationArgs& args, int64_t first, int64_t last) {
    const int64_t blocks = (args.cols + kGatedBlock - 1) / kGatedBlock;
    for (int64_t at = first; at < last; ++at) {
        const int64_t row = at / blocks, begin = at % blocks * kGatedBlock;
        const int64_t count = args.cols - begin < kGatedBlock ? args.cols - begin : kGatedBlock;
        const T* from = static_cast<const T*>(args.wide) + row * args.cols * (args.gated ? 2 : 1) + begin;
        T* out = static_cast<T*>(args.out) + row * args.cols + begin;
        if (args.gated) {
            gated_block<T>(from, from + args.cols, count, static_cast<Gate>(args.form), out);
        } else {
            activated_block<T>(from, count, args.form, out);
        }
    }
}

// sum = x + y
template <typename T>
void add_all(const void* x, const void* y, int64_t count, void* sum) {
    add_rows<T>(static_cast<const T*>(x), static_cast<const T*>(y), count, static_cast<T*>(sum));
}
