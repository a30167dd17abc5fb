// Loops of linear layers of few rows with the products of AVX-512's bf16 instructions: two products and their fp32 sum
// in each lane. For x in bf16, where they are exact: integers of 8 bits are numbers of bf16. Included behind
// linear_loops.h in a pass of its own.

struct Bf16Products {
    using X = Bf16;
    using Register = __m512i;
    static constexpr int64_t kBlock = 64;
    template <typename W>
    static constexpr bool kEvenOdd = Weight<W>::kPerElement == 2;

    static DS_CPU_INLINE_MEMBER void load_weights(const Bf16* from, __m512i* pair) {
        pair[0] = _mm512_loadu_si512(from);
        pair[1] = _mm512_loadu_si512(from + 32);
    }
    static DS_CPU_INLINE_MEMBER void load_weights(const Int8* from, __m512i* pair) {
        pair[0] = narrow32(from);
        pair[1] = narrow32(from + 32);
    }
    // The low numbers, then the high ones, looked up by the low bits of 16: bf16 of 0 to 7 and -8 to -1, twice.
    static DS_CPU_INLINE_MEMBER void load_weights(const Int4Pair* from, __m512i* pair) {
        alignas(64) static constexpr uint16_t kNumbers[32] = {
            0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0xC100, 0xC0E0, 0xC0C0,
            0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0,
            0x40C0, 0x40E0, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80};
        const __m512i numbers = _mm512_load_si512(kNumbers);
        const __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
        pair[0] = _mm512_permutexvar_epi16(bytes, numbers);
        pair[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 4), numbers);
    }
    static DS_CPU_INLINE_MEMBER __m512i load_x(const Bf16* from) { return _mm512_loadu_si512(from); }
    static DS_CPU_INLINE_MEMBER Vec add(Vec sum, __m512i weight, __m512i x) {
        return {_mm512_dpbf16_ps(sum.value, reinterpret_cast<__m512bh>(weight), reinterpret_cast<__m512bh>(x))};
    }
    static DS_CPU_INLINE_MEMBER Bf16 to_x(Bf16 number) { return number; }

  private:
    static DS_CPU_INLINE_MEMBER __m512i narrow32(const Int8* from) {
        return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(load(from + 16).value, load(from).value));
    }
};

template <typename W>
void prepare_linear_bf16(const LinearArgs& args) {
    clear_padding<Bf16Products>(args);
    copy_rows<Bf16Products, W, Bf16>(args);
}

// Outputs [first, last).
template <typename W>
void linear_outs_bf16(const LinearArgs& args, int64_t first, int64_t last) {
    linear_outs_of<Bf16Products, W>(args, first, last);
}
