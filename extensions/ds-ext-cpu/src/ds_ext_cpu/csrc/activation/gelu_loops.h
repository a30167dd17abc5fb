// Loops of gelu and bias-gelu; see [Note: one polynomial for gelu].

// Vectors whose polynomials go side by side: one alone would wait for each of its multiplications. They come in pairs.
constexpr int kSideBySide = Vec::kSize == 1 ? 2 : 4;

template <int kVecs, int kTerms>
DS_CPU_INLINE void gelu_of(Vec* x, const GeluCurve<kTerms>& curve) {
    Vec position[kVecs], slope[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
        position[v] = fma(x[v] * x[v], splat(2 / (curve.bound * curve.bound)), splat(-1));
        slope[v] = splat(curve.terms[kTerms - 1]);
    }
#pragma GCC unroll 16
    for (int term = kTerms - 2; term >= 0; --term) {
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) slope[v] = fma(slope[v], position[v], splat(curve.terms[term]));
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
        Vec share = fma(x[v], slope[v], splat(0.5f));
        // beyond the bound the polynomial is anything, but not chosen; NaN is not beyond, and stays
        share.value = x[v].value > splat(curve.bound).value ? splat(1).value : share.value;
        share.value = x[v].value < splat(-curve.bound).value ? splat(0).value : share.value;
        x[v] = x[v] * share;
    }
}

// Without bias (`kBias` false) the pointer is null and not touched.
template <bool kBias, typename T, int kTerms>
DS_CPU_INLINE void gelu_row(const T* x, const float* bias, int64_t count, const GeluCurve<kTerms> curve, T* out) {
    constexpr int64_t kStep = kSideBySide * Vec::kSize;
    int64_t i = 0;
    for (; i + kStep <= count; i += kStep) {
        Vec values[kSideBySide];
#pragma GCC unroll 4
        for (int v = 0; v < kSideBySide; v += 2) {
            const int64_t at = i + v * Vec::kSize;
            if constexpr (kBias) {  // a pair has an order of its own, which the bias does not have
                values[v] = load(x + at) + load(bias + at);
                values[v + 1] = load(x + at + Vec::kSize) + load(bias + at + Vec::kSize);
            } else {
                load_pair(x + at, values + v);
            }
        }
        gelu_of<kSideBySide>(values, curve);
#pragma GCC unroll 4
        for (int v = 0; v < kSideBySide; v += 2) {
            const int64_t at = i + v * Vec::kSize;
            if constexpr (kBias) {
                store(out + at, values[v]);
                store(out + at + Vec::kSize, values[v + 1]);
            } else {
                store_pair(out + at, values + v);
            }
        }
    }
    for (; i < count; i += Vec::kSize) {
        const int64_t lanes = count - i < Vec::kSize ? count - i : Vec::kSize;
        Vec value = load_part(x + i, lanes);
        if constexpr (kBias) value = value + load_part(bias + i, lanes);
        gelu_of<1>(&value, curve);
        store_part(out + i, value, lanes);
    }
}

// Elements [first, last) of one long row.
template <typename T>
void gelu_range(const GeluArgs& args, int64_t first, int64_t last) {
    const auto curve = args.tanh ? GeluCurves<T>::kTanh : GeluCurves<T>::kErf;
    gelu_row<false>(static_cast<const T*>(args.x) + first, nullptr, last - first, curve,
                    static_cast<T*>(args.out) + first);
}

// Rows [first, last), each with the bias added.
template <typename T>
void bias_gelu_rows(const GeluArgs& args, int64_t first, int64_t last) {
    const auto curve = args.tanh ? GeluCurves<T>::kTanh : GeluCurves<T>::kErf;
    for (int64_t row = first; row < last; ++row) {
        const int64_t at = row * args.cols;
        gelu_row<true>(static_cast<const T*>(args.x) + at, args.bias, args.cols, curve, static_cast<T*>(args.out) + at);
    }
}
