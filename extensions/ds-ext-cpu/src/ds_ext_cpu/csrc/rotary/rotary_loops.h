// Loops of the rotary embedding: plain ones, which the compiler vectorizes.

template <typename T>
DS_CPU_INLINE void turn_halves(const T* __restrict x, const float* __restrict cos, const float* __restrict sin,
                               int64_t half, T* __restrict out) {
    int64_t i = 0;
    for (; i + Vec::kSize <= half; i += Vec::kSize) {
        const Vec a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(out + i, a * c - b * s);
        store(out + half + i, b * c + a * s);
    }
    for (; i < half; ++i) {
        const float a = widen(x[i]), b = widen(x[half + i]);
        out[i] = narrow<T>(a * cos[i] - b * sin[i]);
        out[half + i] = narrow<T>(b * cos[i] + a * sin[i]);
    }
}

template <typename T>
DS_CPU_INLINE void turn_neighbours(const T* __restrict x, const float* __restrict cos, const float* __restrict sin,
                                   int64_t half, T* __restrict out) {
    for (int64_t i = 0; i < half; ++i) {
        const float a = widen(x[2 * i]), b = widen(x[2 * i + 1]);
        out[2 * i] = narrow<T>(a * cos[i] - b * sin[i]);
        out[2 * i + 1] = narrow<T>(b * cos[i] + a * sin[i]);
    }
}

// Heads [first, last).
template <typename T, bool kInterleaved>
void rotary_rows(const RotaryArgs& args, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
        const int64_t position = row / args.rows_per_position % args.length;
        const int64_t batch = args.table_per_batch ? row / args.rows_per_batch : 0;
        const int64_t angle = (batch * args.length + position) * args.half;
        const T* x = static_cast<const T*>(args.x) + row * args.head_dim;
        T* out = static_cast<T*>(args.out) + row * args.head_dim;
        if (kInterleaved) {
            turn_neighbours(x, args.cos + angle, args.sin + angle, args.half, out);
        } else {
            turn_halves(x, args.cos + angle, args.sin + angle, args.half, out);
        }
        for (int64_t i = 2 * args.half; i < args.head_dim; ++i) out[i] = x[i];
    }
}

template <typename T>
void rotary_halves(const RotaryArgs& args, int64_t first, int64_t last) {
    rotary_rows<T, false>(args, first, last);
}

template <typename T>
void rotary_neighbours(const RotaryArgs& args, int64_t first, int64_t last) {
    rotary_rows<T, true>(args, first, last);
}
