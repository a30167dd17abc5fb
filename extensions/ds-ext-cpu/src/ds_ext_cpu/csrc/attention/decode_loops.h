// Loops of attention over a cache; see [Note: attention in chunks].

// Rows of queries by Vecs of a head whose sums are in registers at once.
constexpr int kVecsAtOnce = Vec::kSize < 16 ? 2 : 4;
constexpr float kLeast = -__builtin_inff();

template <typename T>
DS_CPU_INLINE const T* token_at(const DecodeArgs& args, const CacheArgs& cache, const ChunkArgs& chunk, int64_t token) {
    const int64_t block = args.table[chunk.sequence * args.table_stride + token / args.block_size];
    return static_cast<const T*>(cache.data) + block * cache.block_stride +
           token % args.block_size * cache.token_stride + chunk.kv_head * cache.head_stride;
}

// Asks for the tokens of a tile ahead of their use. Where those of a head lie one behind the other, the machine does so
// by itself; in a cache of blocks the other heads' lie between them.
template <typename T>
DS_CPU_INLINE void prefetch_tokens(const DecodeArgs& args, const CacheArgs& cache, const ChunkArgs& chunk,
                                   int64_t first, int64_t tokens) {
    constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
    if (cache.token_stride == args.head_dim || tokens <= 0) return;
    const T* from = token_at<T>(args, cache, chunk, first);
    for (int64_t token = 0; token < tokens; ++token, from += cache.token_stride) {
        for (int64_t i = 0; i < args.head_dim; i += kLine) __builtin_prefetch(from + i, 0, 3);
    }
}

// Tokens from `token` on that a tile takes: of one block and one chunk.
DS_CPU_INLINE int64_t tokens_of_tile(const DecodeArgs& args, const ChunkArgs& chunk, int64_t token) {
    const int64_t in_block = args.block_size - token % args.block_size, in_chunk = chunk.last - token;
    const int64_t tokens = in_block < in_chunk ? in_block : in_chunk;
    return tokens < kTileTokens ? tokens : kTileTokens;
}

// scores[row][token] = scale q[row] . k[token] for kRows rows.
template <typename T, int kRows>
DS_CPU_INLINE void score_rows(const DecodeArgs& args, const float* q, const T* keys, int64_t tokens, float* scores) {
    const int64_t whole = args.head_dim / Vec::kSize * Vec::kSize;
    for (int64_t token = 0; token < tokens; ++token) {
        const T* key = keys + token * args.keys.token_stride;
        Vec sums[kRows];
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) sums[row] = splat(0);
        for (int64_t i = 0; i < whole; i += Vec::kSize) {
            const Vec numbers = load(key + i);
#pragma GCC unroll 4
            for (int row = 0; row < kRows; ++row)
                sums[row] = fma(load(q + row * args.padded_dim + i), numbers, sums[row]);
        }
        if (whole < args.head_dim) {
            const Vec numbers = load_part(key + whole, args.head_dim - whole);
#pragma GCC unroll 4
            for (int row = 0; row < kRows; ++row) {
                sums[row] = fma(load(q + row * args.padded_dim + whole), numbers, sums[row]);
            }
        }
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) scores[row * kTileTokens + token] = sum_of_lanes(sums[row]) * args.scale;
    }
}

// sums[row] += weights[row][token] v[token] for kRows rows and kVecs Vecs of the head, the last of `lanes` elements.
template <typename T, int kRows, int kVecs>
DS_CPU_INLINE void add_values(const DecodeArgs& args, const float* weights, const T* values, int64_t tokens,
                              int64_t lanes, float* sums) {
    Vec own[kRows][kVecs];
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) own[row][v] = load(sums + row * args.padded_dim + v * Vec::kSize);
    }
    for (int64_t token = 0; token < tokens; ++token) {
        const T* value = values + token * args.values.token_stride;
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) {
            const T* from = value + v * Vec::kSize;
            const Vec numbers = kVecs == 1 && lanes < Vec::kSize ? load_part(from, lanes) : load(from);
#pragma GCC unroll 4
            for (int row = 0; row < kRows; ++row) {
                own[row][v] = fma(splat(weights[row * kTileTokens + token]), numbers, own[row][v]);
            }
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) store(sums + row * args.padded_dim + v * Vec::kSize, own[row][v]);
    }
}

template <typename T, int kRows>
DS_CPU_INLINE void add_value_rows(const DecodeArgs& args, const float* weights, const T* values, int64_t tokens,
                                  float* sums) {
    int64_t i = 0;
    for (; i + kVecsAtOnce * Vec::kSize <= args.head_dim; i += kVecsAtOnce * Vec::kSize) {
        add_values<T, kRows, kVecsAtOnce>(args, weights, values + i, tokens, Vec::kSize, sums + i);
    }
    for (; i < args.head_dim; i += Vec::kSize) {
        const int64_t left = args.head_dim - i < Vec::kSize ? args.head_dim - i : Vec::kSize;
        add_values<T, kRows, 1>(args, weights, values + i, tokens, left, sums + i);
    }
}

// Tokens [begin, end) of a tile that a query sees.
struct Seen {
    int64_t begin;
    int64_t end;
};

DS_CPU_INLINE Seen seen_of(const DecodeArgs& args, int64_t position, int64_t first, int64_t tokens) {
    Seen seen = {0, position + 1 - first};
    if (args.window > 0) seen.begin = position + 1 - args.window - first;
    seen.begin = seen.begin < 0 ? 0 : seen.begin;
    seen.end = seen.end > tokens ? tokens : seen.end;
    return seen;
}

// Turns scores into weights exp(score - greatest), 0 for tokens that are not seen. Returns the factor of what was
// summed before, whose greatest score was another.
static float weigh(float* scores, Seen seen, int64_t tokens, float* greatest, float* total) {
    float most = *greatest;
    for (int64_t token = seen.begin; token < seen.end; ++token) most = scores[token] > most ? scores[token] : most;
    for (int64_t token = 0; token < seen.begin && token < tokens; ++token) scores[token] = 0.0f;
    for (int64_t token = seen.end < 0 ? 0 : seen.end; token < tokens; ++token) scores[token] = 0.0f;
    if (seen.end <= seen.begin) return 1.0f;
    for (int64_t token = seen.begin; token < seen.end; ++token) scores[token] = exp_of(scores[token] - most);
    float sum = 0.0f;
    for (int64_t token = seen.begin; token < seen.end; ++token) sum += scores[token];
    const float factor = *greatest == kLeast ? 0.0f : exp_of(*greatest - most);
    *total = *total * factor + sum;
    *greatest = most;
    return factor;
}

template <typename T>
static void attend_tile(const DecodeArgs& args, const ChunkArgs& chunk, int64_t at, int64_t first, int64_t tokens) {
    const int64_t rows = args.rows();
    const T* keys = token_at<T>(args, args.keys, chunk, first);
    const T* values = token_at<T>(args, args.values, chunk, first);
    const float* q = args.queries_of(at);
    float *sums = args.sums_of(at), *scores = args.scores_of(at);
    prefetch_tokens<T>(args, args.values, chunk, first, tokens);
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) {
        score_rows<T, 4>(args, q + row * args.padded_dim, keys, tokens, scores + row * kTileTokens);
    }
    for (; row < rows; ++row) {
        score_rows<T, 1>(args, q + row * args.padded_dim, keys, tokens, scores + row * kTileTokens);
    }
    const int64_t next = first + tokens;
    prefetch_tokens<T>(args, args.keys, chunk, next, next < chunk.last ? tokens_of_tile(args, chunk, next) : 0);
    const int64_t oldest = args.lengths[chunk.sequence] - args.queries;
    for (row = 0; row < rows; ++row) {
        const int64_t position = oldest + row % args.queries;
        float* own = scores + row * kTileTokens;
        if (args.slopes != nullptr) {
            const float slope = args.slopes[chunk.kv_head * args.group + row / args.queries];
            for (int64_t token = 0; token < tokens; ++token) {
                own[token] += slope * static_cast<float>(first + token - position);
            }
        }
        const Seen seen = seen_of(args, position, first, tokens);
        const float factor = weigh(own, seen, tokens, args.greatest_of(at) + row, args.totals_of(at) + row);
        if (factor == 1.0f) continue;
        float* sum = sums + row * args.padded_dim;
        for (int64_t i = 0; i < args.padded_dim; i += Vec::kSize) store(sum + i, load(sum + i) * splat(factor));
    }
    for (row = 0; row + 4 <= rows; row += 4) {
        add_value_rows<T, 4>(args, scores + row * kTileTokens, values, tokens, sums + row * args.padded_dim);
    }
    for (; row < rows; ++row) {
        add_value_rows<T, 1>(args, scores + row * kTileTokens, values, tokens, sums + row * args.padded_dim);
    }
}

// Chunks [first, last).
template <typename T>
void attend_chunks(const DecodeArgs& args, int64_t first, int64_t last) {
    const int64_t rows = args.rows();
    for (int64_t at = first; at < last; ++at) {
        const ChunkArgs chunk = args.chunks[at];
        const T* q =
            static_cast<const T*>(args.q) + (chunk.sequence * args.kv_heads + chunk.kv_head) * rows * args.head_dim;
        std::memset(args.queries_of(at), 0, 2 * rows * args.padded_dim * sizeof(float));
        for (int64_t row = 0; row < rows; ++row) {
            float* own = args.queries_of(at) + row * args.padded_dim;
            for (int64_t i = 0; i < args.head_dim; ++i) own[i] = widen(q[row * args.head_dim + i]);
            args.greatest_of(at)[row] = kLeast;
            args.totals_of(at)[row] = 0.0f;
        }
        for (int64_t token = chunk.first; token < chunk.last;) {
            const int64_t tokens = tokens_of_tile(args, chunk, token);
            attend_tile<T>(args, chunk, at, token, tokens);
            token += tokens;
        }
    }
}

// Adds up the chunks of sequences and key-value heads [first, last).
template <typename T>
void join_chunks(const DecodeArgs& args, int64_t first, int64_t last) {
    const int64_t rows = args.rows();
    for (int64_t at = first; at < last; ++at) {
        const int64_t begin = args.starts[at], end = args.starts[at + 1];
        for (int64_t row = 0; row < rows; ++row) {
            float most = kLeast, total = 0.0f;
            for (int64_t chunk = begin; chunk < end; ++chunk) {
                const float greatest = args.greatest_of(chunk)[row];
                most = greatest > most ? greatest : most;
            }
            float* sum = args.sums_of(begin) + row * args.padded_dim;
            for (int64_t chunk = begin; chunk < end; ++chunk) {
                const float own = args.greatest_of(chunk)[row];
                const float factor = own == kLeast ? 0.0f : exp_of(own - most);
                total += factor * args.totals_of(chunk)[row];
                const float* from = args.sums_of(chunk) + row * args.padded_dim;
                for (int64_t i = 0; i < args.padded_dim; i += Vec::kSize) {
                    const Vec scaled = load(from + i) * splat(factor);
                    store(sum + i, chunk == begin ? scaled : load(sum + i) + scaled);
                }
            }
            T* out = static_cast<T*>(args.out) + (at * rows + row) * args.head_dim;
            const float share = 1.0f / total;
            for (int64_t i = 0; i < args.head_dim; ++i) out[i] = narrow<T>(sum[i] * share);
        }
    }
}
