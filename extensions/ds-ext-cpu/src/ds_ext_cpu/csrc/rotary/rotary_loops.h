// Loops of the rotary embedding.

template <typename T>
DS_CPU_INLINE void turn_halves(const T* x, const float* cos, const float* sin, int64_t half, T* out) {
    for (int64_t i = 0; i < half; i += Vec::kSize) {
        if (i + Vec::kSize <= half) {
            const Vec a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
            store(out + i, a * c - b * s);
            store(out + half + i, b * c + a * s);
        } else {
            const int64_t left = half - i;
            const Vec a = load_part(x + i, left), b = load_part(x + half + i, left);
            const Vec c = load_part(cos + i, left), s = load_part(sin + i, left);
            store_part(out + i, a * c - b * s, left);
            store_part(out + half + i, b * c + a * s, left);
        }
    }
}

// A plain loop, in fp32 alone: the compiler finds the permutations.
static void turn_neighbours(const float* __restrict x, const float* __restrict cos, const float* __restrict sin,
                            int64_t half, float* __restrict out) {
    for (int64_t i = 0; i < half; ++i) {
        const float a = x[2 * i], b = x[2 * i + 1];
        out[2 * i] = a * cos[i] - b * sin[i];
        out[2 * i + 1] = b * cos[i] + a * sin[i];
    }
}

// bf16 and fp16 pass through fp32 in the first cache.
template <typename T>
static void turn_neighbours(const T* x, const float* cos, const float* sin, int64_t half, T* out) {
    constexpr int64_t kPairs = 256;
    float wide[2 * kPairs], turned[2 * kPairs];
    for (int64_t begin = 0; begin < half; begin += kPairs) {
        const int64_t pairs = half - begin < kPairs ? half - begin : kPairs, count = 2 * pairs;
        const T* from = x + 2 * begin;
        T* to = out + 2 * begin;
        int64_t i = 0;
        for (; i + Vec::kSize <= count; i += Vec::kSize) store(wide + i, load(from + i));
        if (i < count) store_part(wide + i, load_part(from + i, count - i), count - i);
        turn_neighbours(static_cast<const float*>(wide), cos + begin, sin + begin, pairs, turned);
        for (i = 0; i + Vec::kSize <= count; i += Vec::kSize) store(to + i, load(turned + i));
        if (i < count) store_part(to + i, load_part(turned + i, count - i), count - i);
    }
}

// Heads [first, last).
template <typename T>
void rotary_rows(const RotaryArgs& args, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
        const int64_t position = row / args.rows_per_position % args.length;
        const int64_t batch = args.table_per_batch ? row / args.rows_per_batch : 0;
        const int64_t angle = (batch * args.length + position) * args.half;
        const T* x = static_cast<const T*>(args.x) + row * args.head_dim;
        T* out = static_cast<T*>(args.out) + row * args.head_dim;
        if (args.interleaved) {
            turn_neighbours(x, args.cos + angle, args.sin + angle, args.half, out);
        } else {
            turn_halves(x, args.cos + angle, args.sin + angle, args.half, out);
        }
        const int64_t turned = 2 * args.half;
        if (turned < args.head_dim) std::memcpy(out + turned, x + turned, (args.head_dim - turned) * sizeof(T));
    }
}
