// Vec of 8 fp32 numbers; included by each_isa.h inside namespace ds_cpu::avx2.

struct Vec {
    static constexpr int64_t kSize = 8;
    __m256 value;
};

DS_CPU_INLINE Vec splat(float value) { return {_mm256_set1_ps(value)}; }
DS_CPU_INLINE Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.value, b.value)}; }
DS_CPU_INLINE Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.value, b.value)}; }
DS_CPU_INLINE Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.value, b.value)}; }
DS_CPU_INLINE Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.value, b.value)}; }
DS_CPU_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.value, b.value, c.value)}; }
DS_CPU_INLINE Vec sqrt(Vec a) { return {_mm256_sqrt_ps(a.value)}; }
// 1 / a to 11 bits or more.
DS_CPU_INLINE Vec rough_reciprocal(Vec a) { return {_mm256_rcp_ps(a.value)}; }
// By halves.
DS_CPU_INLINE float sum_of_lanes(Vec a) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(a.value), _mm256_extractf128_ps(a.value, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
DS_CPU_INLINE void sums_of_four(const Vec* vecs, float* to) {
    for (int i = 0; i < 4; ++i) to[i] = sum_of_lanes(vecs[i]);
}
// a, or b where a is NaN.
DS_CPU_INLINE Vec number_or(Vec a, Vec b) {
    return {_mm256_blendv_ps(a.value, b.value, _mm256_cmp_ps(a.value, a.value, _CMP_UNORD_Q))};
}
// -1, 0 or 1; 0 for NaN, as torch.sign has it.
DS_CPU_INLINE Vec sign(Vec a) {
    const __m256 ordered_nonzero = _mm256_cmp_ps(a.value, _mm256_setzero_ps(), _CMP_NEQ_OQ);
    const __m256 one = _mm256_or_ps(_mm256_and_ps(a.value, _mm256_set1_ps(-0.0f)), _mm256_set1_ps(1.0f));
    return {_mm256_and_ps(one, ordered_nonzero)};
}

DS_CPU_INLINE Vec load(const float* from) { return {_mm256_loadu_ps(from)}; }
DS_CPU_INLINE Vec load(const Bf16* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
}
DS_CPU_INLINE Vec load(const Fp16* from) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
}
DS_CPU_INLINE Vec load(const Int8* from) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))};
}

DS_CPU_INLINE void store(float* to, Vec a) { _mm256_storeu_ps(to, a.value); }
// The arithmetic of narrow<Bf16> (half.h) on 8 lanes: the bf16 is the upper half of each, the lower one is anything.
DS_CPU_INLINE __m256i rounded_to_bf16(Vec a) {
    const __m256i bits = _mm256_castps_si256(a.value);
    const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), last);
    const __m256i quiet_nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a.value, a.value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(sum, quiet_nan, is_nan);
}
DS_CPU_INLINE void store(Bf16* to, Vec a) {
    const __m256i halves = _mm256_srli_epi32(rounded_to_bf16(a), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(halves, halves), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
}
DS_CPU_INLINE void store(Fp16* to, Vec a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(a.value, _MM_FROUND_TO_NEAREST_INT));
}

// The first `count` lanes (0 < count <= kSize); the others read as 0 and are not written.
template <typename T>
DS_CPU_INLINE Vec load_part(const T* from, int64_t count) {
    T lanes[Vec::kSize] = {};
    for (int64_t lane = 0; lane < count; ++lane) lanes[lane] = from[lane];
    return load(lanes);
}
template <typename T>
DS_CPU_INLINE void store_part(T* to, Vec a, int64_t count) {
    T lanes[Vec::kSize];
    store(lanes, a);
    for (int64_t lane = 0; lane < count; ++lane) to[lane] = lanes[lane];
}

// The elements at even places and those at odd ones: so no lane has to move, which costs more than the shift or mask.
DS_CPU_INLINE void load_pair(const Bf16* from, Vec* pair) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    pair[0].value = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    pair[1].value = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(-0x10000)));
}
DS_CPU_INLINE void store_pair(Bf16* to, const Vec* pair) {
    const __m256i even = _mm256_srli_epi32(rounded_to_bf16(pair[0]), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_blend_epi16(even, rounded_to_bf16(pair[1]), 0xAA));
}
// kSize bytes: the low numbers, then the high ones.
DS_CPU_INLINE void load_pair(const Int4Pair* from, Vec* pair) {
    const __m256i bytes = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    pair[0].value = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(bytes, 28), 28));
    pair[1].value = _mm256_cvtepi32_ps(_mm256_srai_epi32(bytes, 4));
}
