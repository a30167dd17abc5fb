// Loops of layer norm and RMS norm, with and without the residual addition before them.

// Partial sums by lane, in four chains that do not wait for each other; also more exact than one chain.
struct Sums {
    Vec part[4];
};

DS_CPU_INLINE Sums no_sums() { return {{splat(0), splat(0), splat(0), splat(0)}}; }
DS_CPU_INLINE float total(const Sums& sums) {
    return sum_of_lanes((sums.part[0] + sums.part[1]) + (sums.part[2] + sums.part[3]));
}

template <typename T>
DS_CPU_INLINE float sum_of_row(const T* x, int64_t cols) {
    Sums sums = no_sums();
    int64_t i = 0;
    for (; i + 4 * Vec::kSize <= cols; i += 4 * Vec::kSize) {
        for (int chain = 0; chain < 4; ++chain) {
            sums.part[chain] = sums.part[chain] + load(x + i + chain * Vec::kSize);
        }
    }
    for (; i + Vec::kSize <= cols; i += Vec::kSize) sums.part[0] = sums.part[0] + load(x + i);
    if (i < cols) sums.part[1] = sums.part[1] + load_part(x + i, cols - i);
    return total(sums);
}

template <typename T>
DS_CPU_INLINE float squares_of_row(const T* x, int64_t cols, float mean) {
    const Vec center = splat(mean);
    Sums sums = no_sums();
    int64_t i = 0;
    for (; i + 4 * Vec::kSize <= cols; i += 4 * Vec::kSize) {
        for (int chain = 0; chain < 4; ++chain) {
            const Vec distance = load(x + i + chain * Vec::kSize) - center;
            sums.part[chain] = fma(distance, distance, sums.part[chain]);
        }
    }
    for (; i + Vec::kSize <= cols; i += Vec::kSize) {
        const Vec distance = load(x + i) - center;
        sums.part[0] = fma(distance, distance, sums.part[0]);
    }
    float sum = total(sums);
    if (i < cols) {  // lanes beyond the row are not at distance 0
        float lanes[Vec::kSize];
        store(lanes, load_part(x + i, cols - i) - center);
        for (int64_t lane = 0; lane < cols - i; ++lane) sum += lanes[lane] * lanes[lane];
    }
    return sum;
}

template <typename T>
DS_CPU_INLINE void add_rows(const T* x, const T* residual, int64_t cols, T* sum) {
    int64_t i = 0;
    for (; i + Vec::kSize <= cols; i += Vec::kSize) store(sum + i, load(x + i) + load(residual + i));
    if (i < cols) store_part(sum + i, load_part(x + i, cols - i) + load_part(residual + i, cols - i), cols - i);
}

// out = (x - mean) * scale * weight + bias
template <typename T>
DS_CPU_INLINE void write_row(const T* x, int64_t cols, float mean, float scale, const float* weight, const float* bias,
                             T* out) {
    const Vec center = splat(mean), factor = splat(scale);
    int64_t i = 0;
    for (; i + Vec::kSize <= cols; i += Vec::kSize) {
        store(out + i, fma((load(x + i) - center) * factor, load(weight + i), load(bias + i)));
    }
    if (i < cols) {
        const int64_t left = cols - i;
        const Vec normed = (load_part(x + i, left) - center) * factor;
        store_part(out + i, fma(normed, load_part(weight + i, left), load_part(bias + i, left)), left);
    }
}

// Rows [first, last): memory is read once, the second and third look at a row find it in cache.
template <typename T>
void norm_rows(const NormArgs& args, int64_t first, int64_t last) {
    const int64_t cols = args.cols;
    for (int64_t row = first; row < last; ++row) {
        const T* x = static_cast<const T*>(args.x) + row * cols;
        if (args.residual != nullptr) {
            T* sum = static_cast<T*>(args.sum) + row * cols;
            add_rows(x, static_cast<const T*>(args.residual) + row * cols, cols, sum);
            x = sum;
        }
        const float count = static_cast<float>(cols);
        const float mean = args.centered ? sum_of_row(x, cols) / count : 0.0f;
        const float scale = 1.0f / __builtin_sqrtf(squares_of_row(x, cols, mean) / count + args.eps);
        write_row(x, cols, mean, scale, args.weight, args.bias, static_cast<T*>(args.out) + row * cols);
    }
}
