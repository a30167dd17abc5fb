// Vec of 16 fp32 numbers; included by each_isa.h inside namespace ds_cpu::avx512.

struct Vec {
    static constexpr int64_t kSize = 16;
    __m512 value;
};

DS_CPU_INLINE Vec splat(float value) { return {_mm512_set1_ps(value)}; }
DS_CPU_INLINE Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.value, b.value)}; }
DS_CPU_INLINE Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.value, b.value)}; }
DS_CPU_INLINE Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.value, b.value)}; }
DS_CPU_INLINE Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.value, b.value)}; }
DS_CPU_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.value, b.value, c.value)}; }
DS_CPU_INLINE Vec sqrt(Vec a) { return {_mm512_sqrt_ps(a.value)}; }
// 1 / a to 11 bits or more.
DS_CPU_INLINE Vec rough_reciprocal(Vec a) { return {_mm512_rcp14_ps(a.value)}; }
// By halves.
DS_CPU_INLINE float sum_of_lanes(Vec a) { return _mm512_reduce_add_ps(a.value); }
// The sums of the lanes of each, each in one order.
DS_CPU_INLINE __m128 sums_of_four(Vec a, Vec b, Vec c, Vec d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a.value, b.value), _mm512_unpackhi_ps(a.value, b.value));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c.value, d.value), _mm512_unpackhi_ps(c.value, d.value));
    const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512 all = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
DS_CPU_INLINE void sums_of_four(const Vec* vecs, float* to) {
    _mm_storeu_ps(to, sums_of_four(vecs[0], vecs[1], vecs[2], vecs[3]));
}
// a, or b where a is NaN.
DS_CPU_INLINE Vec number_or(Vec a, Vec b) {
    return {_mm512_mask_mov_ps(a.value, _mm512_cmp_ps_mask(a.value, a.value, _CMP_UNORD_Q), b.value)};
}
// -1, 0 or 1; 0 for NaN, as torch.sign has it.
DS_CPU_INLINE Vec sign(Vec a) {
    const __mmask16 ordered_nonzero = _mm512_cmp_ps_mask(a.value, _mm512_setzero_ps(), _CMP_NEQ_OQ);
    const __m512 one = _mm512_or_ps(_mm512_and_ps(a.value, _mm512_set1_ps(-0.0f)), _mm512_set1_ps(1.0f));
    return {_mm512_maskz_mov_ps(ordered_nonzero, one)};
}

// Conversions between a register of 16 halves and fp32.
DS_CPU_INLINE Vec widen16(__m256i bits, const Bf16*) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
DS_CPU_INLINE Vec widen16(__m256i bits, const Fp16*) { return {_mm512_cvtph_ps(bits)}; }
// The arithmetic of narrow<Bf16> (half.h) on 16 lanes: the bf16 is the upper half of each, the lower one is anything.
DS_CPU_INLINE __m512i rounded_to_bf16(Vec a) {
    const __m512i bits = _mm512_castps_si512(a.value);
    const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), last);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(a.value, a.value, _CMP_UNORD_Q);
    return _mm512_mask_or_epi32(sum, is_nan, bits, _mm512_set1_epi32(0x400000));
}
DS_CPU_INLINE __m256i narrow16(Vec a, const Bf16*) {
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_to_bf16(a), 16));
}
DS_CPU_INLINE __m256i narrow16(Vec a, const Fp16*) { return _mm512_cvtps_ph(a.value, _MM_FROUND_TO_NEAREST_INT); }

DS_CPU_INLINE Vec load(const float* from) { return {_mm512_loadu_ps(from)}; }
template <typename T>
DS_CPU_INLINE Vec load(const T* from) {
    return widen16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), from);
}
DS_CPU_INLINE Vec load(const Int8* from) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))))};
}
DS_CPU_INLINE void store(float* to, Vec a) { _mm512_storeu_ps(to, a.value); }
template <typename T>
DS_CPU_INLINE void store(T* to, Vec a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow16(a, to));
}

// The first `count` lanes (0 < count <= kSize); the others read as 0 and are not written.
DS_CPU_INLINE __mmask16 first_lanes(int64_t count) { return static_cast<__mmask16>((1u << count) - 1u); }
DS_CPU_INLINE Vec load_part(const float* from, int64_t count) {
    return {_mm512_maskz_loadu_ps(first_lanes(count), from)};
}
template <typename T>
DS_CPU_INLINE Vec load_part(const T* from, int64_t count) {
    return widen16(_mm256_maskz_loadu_epi16(first_lanes(count), from), from);
}
DS_CPU_INLINE void store_part(float* to, Vec a, int64_t count) {
    _mm512_mask_storeu_ps(to, first_lanes(count), a.value);
}
template <typename T>
DS_CPU_INLINE void store_part(T* to, Vec a, int64_t count) {
    _mm256_mask_storeu_epi16(to, first_lanes(count), narrow16(a, to));
}

// The elements at even places and those at odd ones: so no lane has to move, which costs more than the shift or mask.
DS_CPU_INLINE void load_pair(const Bf16* from, Vec* pair) {
    const __m512i bits = _mm512_loadu_si512(from);
    pair[0].value = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    pair[1].value = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(-0x10000)));
}
DS_CPU_INLINE void store_pair(Bf16* to, const Vec* pair) {
    const __m512i even = _mm512_srli_epi32(rounded_to_bf16(pair[0]), 16);
    _mm512_storeu_si512(to, _mm512_mask_blend_epi16(0xAAAAAAAAu, even, rounded_to_bf16(pair[1])));
}
// kSize bytes: the low numbers, then the high ones. Looked up in a register, by the low 4 bits of each lane.
DS_CPU_INLINE void load_pair(const Int4Pair* from, Vec* pair) {
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    pair[0].value = _mm512_permutexvar_ps(bytes, numbers);
    pair[1].value = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), numbers);
}
