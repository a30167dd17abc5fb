// Vec of one fp32 number; included by each_isa.h inside namespace ds_cpu::scalar.

struct Vec {
    static constexpr int64_t kSize = 1;
    float value;
};

DS_CPU_INLINE Vec splat(float value) { return {value}; }
DS_CPU_INLINE Vec operator+(Vec a, Vec b) { return {a.value + b.value}; }
DS_CPU_INLINE Vec operator-(Vec a, Vec b) { return {a.value - b.value}; }
DS_CPU_INLINE Vec operator*(Vec a, Vec b) { return {a.value * b.value}; }
DS_CPU_INLINE Vec operator/(Vec a, Vec b) { return {a.value / b.value}; }
// In one rounding as the vectors have it. x86-64 itself has no such instruction: the product is exact in fp64, and
// rounding the sum twice differs in one case of 2^28.
DS_CPU_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__aarch64__)
    return {__builtin_fmaf(a.value, b.value, c.value)};
#else
    return {static_cast<float>(static_cast<double>(a.value) * b.value + c.value)};
#endif
}
DS_CPU_INLINE Vec sqrt(Vec a) { return {__builtin_sqrtf(a.value)}; }
// 1 / a to 11 bits or more.
DS_CPU_INLINE Vec rough_reciprocal(Vec a) { return {1.0f / a.value}; }
DS_CPU_INLINE float sum_of_lanes(Vec a) { return a.value; }
DS_CPU_INLINE void sums_of_four(const Vec* vecs, float* to) {
    for (int i = 0; i < 4; ++i) to[i] = sum_of_lanes(vecs[i]);
}
DS_CPU_INLINE Vec number_or(Vec a, Vec b) { return a.value == a.value ? a : b; }
DS_CPU_INLINE Vec sign(Vec a) { return {a.value > 0 ? 1.0f : a.value < 0 ? -1.0f : 0.0f}; }

template <typename T>
DS_CPU_INLINE Vec load(const T* from) {
    return {widen(*from)};
}
DS_CPU_INLINE Vec load(const Int8* from) { return {static_cast<float>(from->value)}; }
// kSize bytes: the low numbers, then the high ones.
DS_CPU_INLINE void load_pair(const Int4Pair* from, Vec* pair) {
    const int8_t high = static_cast<int8_t>(from->bits), low = static_cast<int8_t>(from->bits << 4);
    pair[0].value = static_cast<float>(low >> 4);
    pair[1].value = static_cast<float>(high >> 4);
}
template <typename T>
DS_CPU_INLINE void store(T* to, Vec a) {
    *to = narrow<T>(a.value);
}
// The first `count` lanes (0 < count <= kSize), which here is the one.
template <typename T>
DS_CPU_INLINE Vec load_part(const T* from, int64_t) {
    return load(from);
}
template <typename T>
DS_CPU_INLINE void store_part(T* to, Vec a, int64_t) {
    store(to, a);
}
