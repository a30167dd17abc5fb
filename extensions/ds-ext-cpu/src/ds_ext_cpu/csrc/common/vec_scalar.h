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
DS_CPU_INLINE Vec fma(Vec a, Vec b, Vec c) { return {a.value * b.value + c.value}; }
DS_CPU_INLINE Vec sqrt(Vec a) { return {__builtin_sqrtf(a.value)}; }
DS_CPU_INLINE Vec sign(Vec a) { return {a.value > 0 ? 1.0f : a.value < 0 ? -1.0f : 0.0f}; }

template <typename T>
DS_CPU_INLINE Vec load(const T* from) {
    return {widen(*from)};
}
template <typename T>
DS_CPU_INLINE void store(T* to, Vec a) {
    *to = narrow<T>(a.value);
}
// The first `count` lanes (0 < count < kSize); the others read as 0 and are not written. Never used with one lane.
template <typename T>
DS_CPU_INLINE Vec load_part(const T* from, int64_t) {
    return load(from);
}
template <typename T>
DS_CPU_INLINE void store_part(T* to, Vec a, int64_t) {
    store(to, a);
}
