// Loops of linear layers of few rows of bf16 with int8 and int4 weights, in integers. Included behind linear_loops.h in
// a pass of its own.

// [Note: x in 16 bits]
// Of each group of a row of x the greatest |x| becomes 127 * 256, and every number the nearest whole one: off by at
// most 2^-16 of the greatest, where bf16 rounds the result to 2^-9 of itself. q = 256 hi + lo with two signed bytes, so
// that AVX-512's products of bytes, exact and summed in 32 bits, take the weight as it lies. They want it unsigned:
// 128, or 8 with 4 bits, is added to every number of it and that many sums of q are taken off at the end. A number that
// is not finite makes its group's factor NaN; a group below 1e-30 is 0.

constexpr int64_t kBytesAtOnce = 64;
template <typename W>
constexpr int64_t kNumbersAtOnce = kBytesAtOnce * Weight<W>::kPerElement;
template <typename W>
constexpr float kAdded = Weight<W>::kPerElement == 1 ? 128.0f : 8.0f;

// The parts of the copy of x: for each block the high bytes and the low ones, with 4 bits of the even numbers first;
// the factor of each row and group, and what its part of the result is too large by.
struct IntegerCopy {
    int8_t* bytes;
    float* factors;
    float* excess;
};

DS_CPU_INLINE IntegerCopy integer_copy(const LinearArgs& args) {
    float* factors = args.copy + args.padded_rows * args.groups * args.group_stride / 2;
    return {reinterpret_cast<int8_t*>(args.copy), factors, factors + args.padded_rows * args.groups};
}

DS_CPU_INLINE __m512i load_bf16(const Bf16* x, int64_t count) {
    if (count >= 32) return _mm512_loadu_si512(x);
    return count <= 0 ? _mm512_setzero_si512()
                      : _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << count) - 1), x);
}

// 16 numbers, each in the high half of 32 bits, as high and low bytes; added to `sum`.
DS_CPU_INLINE void split_bytes(__m512i numbers, __m512 inverse, int8_t* high, int8_t* low, __m512i* sum) {
    const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(numbers), inverse));
    const __m512i top = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
    *sum = _mm512_add_epi32(*sum, q);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high), _mm512_cvtepi32_epi8(top));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(low), _mm512_cvtepi32_epi8(q));
}

DS_CPU_INLINE uint32_t greatest_bits(const Bf16* x, int64_t count) {
    __m512i most = _mm512_setzero_si512();
    const __m512i magnitude = _mm512_set1_epi16(0x7FFF);
    for (int64_t i = 0; i < count; i += 32) {
        most = _mm512_max_epu16(most, _mm512_and_si512(load_bf16(x + i, count - i), magnitude));
    }
    const __m512i high = _mm512_srli_epi32(most, 16), low = _mm512_and_si512(most, _mm512_set1_epi32(0xFFFF));
    return static_cast<uint32_t>(_mm512_reduce_max_epi32(_mm512_max_epi32(high, low)));
}

// One group of one row. `bytes`: 2 * args.group_stride of them.
template <typename W>
DS_CPU_INLINE void copy_group(const Bf16* x, int64_t count, int64_t stride, int8_t* bytes, float* factor,
                              float* excess) {
    constexpr bool kEvenOdd = Weight<W>::kPerElement == 2;
    const uint32_t bits = greatest_bits(x, count);
    const float greatest = float_of(bits << 16);
    const bool is_used = bits < 0x7F80u && greatest >= 1e-30f;
    const __m512 inverse = _mm512_set1_ps(is_used ? 32512.0f / greatest : 0.0f);
    *factor = bits >= 0x7F80u ? __builtin_nanf("") : is_used ? greatest / 32512.0f : 0.0f;
    *excess = 0.0f;
    if (!is_used) {
        std::memset(bytes, 0, 2 * stride);
        return;
    }
    __m512i sum = _mm512_setzero_si512();
    for (int64_t i = 0; i < stride; i += 32) {
        const __m512i numbers = load_bf16(x + i, count - i);
        int8_t* block = bytes + i / kNumbersAtOnce<W> * 2 * kNumbersAtOnce<W>;
        const int64_t at = i % kNumbersAtOnce<W>;
        if constexpr (kEvenOdd) {
            const __m512i odd = _mm512_and_si512(numbers, _mm512_set1_epi32(static_cast<int32_t>(0xFFFF0000u)));
            split_bytes(_mm512_slli_epi32(numbers, 16), inverse, block + at / 2, block + 64 + at / 2, &sum);
            split_bytes(odd, inverse, block + 128 + at / 2, block + 192 + at / 2, &sum);
        } else {
            for (int half = 0; half < 2; ++half) {
                const __m256i part =
                    half == 0 ? _mm512_castsi512_si256(numbers) : _mm512_extracti64x4_epi64(numbers, 1);
                const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(part), 16);
                split_bytes(wide, inverse, block + at + 16 * half, block + 64 + at + 16 * half, &sum);
            }
        }
    }
    *excess = *factor * kAdded<W> * static_cast<float>(_mm512_reduce_add_epi32(sum));
}

template <typename W>
void prepare_linear_vnni(const LinearArgs& args) {
    const IntegerCopy copy = integer_copy(args);
    for (int64_t row = 0; row < args.padded_rows; ++row) {
        for (int64_t group = 0; group < args.groups; ++group) {
            const int64_t at = row * args.groups + group;
            int8_t* bytes = copy.bytes + at * 2 * args.group_stride;
            if (row >= args.rows) {
                std::memset(bytes, 0, 2 * args.group_stride);
                copy.factors[at] = copy.excess[at] = 0.0f;
                if (args.sums != nullptr) args.sums[at] = 0.0f;
                continue;
            }
            const Bf16* x = static_cast<const Bf16*>(args.x) + at * args.group_size;
            copy_group<W>(x, args.group_size, args.group_stride, bytes, copy.factors + at, copy.excess + at);
            if (args.sums != nullptr) args.sums[at] = sum_of(x, args.group_size);
        }
    }
}

// Products of 64 bytes of kOuts rows of the weight with kRows rows of x; `step` bytes from one row of x to the next.
template <typename W, int kOuts, int kRows>
DS_CPU_INLINE void add_integers(const __m512i* weights, const int8_t* x, int64_t step, __m512i (*high)[kRows],
                                __m512i (*low)[kRows]) {
    constexpr int kParts = Weight<W>::kPerElement;
    __m512i parts[kOuts][kParts];
#pragma GCC unroll 4
    for (int out = 0; out < kOuts; ++out) {
        if constexpr (kParts == 1) {
            parts[out][0] = _mm512_xor_si512(weights[out], _mm512_set1_epi8(static_cast<char>(0x80)));
        } else {
            const __m512i nibble = _mm512_set1_epi8(0x0F);
            const __m512i raised = _mm512_xor_si512(weights[out], _mm512_set1_epi8(static_cast<char>(0x88)));
            parts[out][0] = _mm512_and_si512(raised, nibble);
            parts[out][1] = _mm512_and_si512(_mm512_srli_epi16(raised, 4), nibble);
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) {
            const int8_t* from = x + row * step + part * 128;
            const __m512i top = _mm512_load_si512(from), rest = _mm512_load_si512(from + 64);
#pragma GCC unroll 4
            for (int out = 0; out < kOuts; ++out) {
                high[out][row] = _mm512_dpbusd_epi32(high[out][row], parts[out][part], top);
                low[out][row] = _mm512_dpbusd_epi32(low[out][row], parts[out][part], rest);
            }
        }
    }
}

// As `narrow<Bf16>`, of four.
DS_CPU_INLINE void store_four(Bf16* to, __m128 values) {
    const __m128i bits = _mm_castps_si128(values), top = _mm_srli_epi32(bits, 16);
    const __m128i odd = _mm_and_si128(top, _mm_set1_epi32(1));
    const __m128i rounded = _mm_srli_epi32(_mm_add_epi32(_mm_add_epi32(bits, _mm_set1_epi32(0x7FFF)), odd), 16);
    const __m128i quiet_nan = _mm_or_si128(top, _mm_set1_epi32(0x40));
    const __mmask8 is_nan = _mm_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to),
                     _mm_cvtepi32_epi16(_mm_mask_mov_epi32(rounded, is_nan, quiet_nan)));
}

// kOuts outputs, from `out` on, of kRows rows of x, from `row` on; of a later tile kAsked outputs are asked for, from
// `asked` on.
template <typename W, int kOuts, int kRows, int kAsked>
DS_CPU_INLINE void vnni_tile(const LinearArgs& args, int64_t out, int64_t row, int64_t asked) {
    const IntegerCopy copy = integer_copy(args);
    const int64_t row_bytes = args.groups * args.group_bytes, step = args.groups * 2 * args.group_stride;
    const int64_t whole = args.group_bytes / kBytesAtOnce, left = args.group_bytes % kBytesAtOnce;
    constexpr int64_t kStep = 2 * kNumbersAtOnce<W>;
    const uint8_t* ahead = args.weight + (out + asked) * row_bytes + args.prefetch_bytes;
    Vec totals[kOuts][kRows];
    float offsets[kOuts][kRows] = {};
    __m512i weights[kOuts];
#pragma GCC unroll 4
    for (int o = 0; o < kOuts; ++o) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) totals[o][r] = splat(0);
    }
    if (args.zeros != nullptr) add_zeros<kOuts, kRows>(args, out, row, offsets);
    for (int64_t group = 0; group < args.groups; ++group) {
        const uint8_t* weight = args.weight + out * row_bytes + group * args.group_bytes;
        const int8_t* x = copy.bytes + (row * args.groups + group) * 2 * args.group_stride;
        __m512i high[kOuts][kRows], low[kOuts][kRows];
#pragma GCC unroll 4
        for (int o = 0; o < kOuts; ++o) {
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) high[o][r] = low[o][r] = _mm512_setzero_si512();
        }
        for (int64_t block = 0; block < whole; ++block) {
#pragma GCC unroll 4
            for (int o = 0; o < kOuts; ++o) {
                const uint8_t* from = weight + o * row_bytes + block * kBytesAtOnce;
                weights[o] = _mm512_loadu_si512(from);
            }
#pragma GCC unroll 4
            for (int o = 0; o < kAsked; ++o) {
                __builtin_prefetch(ahead + o * row_bytes + group * args.group_bytes + block * kBytesAtOnce, 0, 2);
            }
            add_integers<W, kOuts, kRows>(weights, x + block * kStep, step, high, low);
        }
        if (left > 0) {
            const auto mask = static_cast<__mmask64>((uint64_t{1} << left) - 1);
#pragma GCC unroll 4
            for (int o = 0; o < kOuts; ++o) {
                weights[o] = _mm512_maskz_loadu_epi8(mask, weight + o * row_bytes + whole * kBytesAtOnce);
            }
            add_integers<W, kOuts, kRows>(weights, x + whole * kStep, step, high, low);
        }
#pragma GCC unroll 4
        for (int o = 0; o < kOuts; ++o) {
            const float scale = args.scales[(out + o) * args.groups + group];
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                const Vec tops{_mm512_cvtepi32_ps(high[o][r])}, rests{_mm512_cvtepi32_ps(low[o][r])};
                const Vec sum = fma(tops, splat(256), rests);
                if (args.groups == 1) {  // is scaled once it is one number
                    totals[o][r] = sum;
                } else {
                    const int64_t at = (row + r) * args.groups + group;
                    totals[o][r] = fma(sum, splat(scale * copy.factors[at]), totals[o][r]);
                    offsets[o][r] -= scale * copy.excess[at];
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
        if (row + r >= args.rows) break;
        float results[kOuts];
        const float factor = args.groups == 1 ? copy.factors[row + r] : 1.0f;
        const float excess = args.groups == 1 ? copy.excess[row + r] : 0.0f;
        Bf16* const y = static_cast<Bf16*>(args.y) + (row + r) * args.outs + out;
        if constexpr (kOuts == 4) {
            if (args.groups == 1 && args.zeros == nullptr) {
                const __m128 sums = sums_of_four(totals[0][r], totals[1][r], totals[2][r], totals[3][r]);
                const __m128 scales = _mm_loadu_ps(args.scales + out);
                const __m128 bias = args.bias == nullptr ? _mm_setzero_ps() : _mm_loadu_ps(args.bias + out);
                const __m128 exact = _mm_fmsub_ps(sums, _mm_set1_ps(factor), _mm_set1_ps(excess));
                store_four(y, _mm_fmadd_ps(exact, scales, bias));
                continue;
            }
        }
        for (int o = 0; o < kOuts; ++o) {  // in the order of four, so that it does not matter where they begin
            const float scale = args.groups == 1 ? args.scales[out + o] : 1.0f;
            const float rest = offsets[o][r] + (args.bias == nullptr ? 0.0f : args.bias[out + o]);
            const float sum = _mm_cvtss_f32(sums_of_four(totals[o][r], splat(0), splat(0), splat(0)));
            results[o] = __builtin_fmaf(__builtin_fmaf(sum, factor, -excess), scale, rest);
        }
        for (int o = 0; o < kOuts; ++o) y[o] = narrow<Bf16>(results[o]);
    }
}

template <typename W, int kOuts, int kRows, int kPasses>
static void vnni_tiles(const LinearArgs& given, int64_t first, int64_t last) {
    LinearArgs args = given;
    args.prefetch_bytes = prefetch_bytes(kOuts * args.groups * args.group_bytes);
    constexpr int kAsked = asked_in_a_pass(kOuts, kPasses);
    int64_t out = first;
    for (; out + kOuts <= last; out += kOuts) {
        for (int64_t pass = 0; pass < kPasses; ++pass) {
            vnni_tile<W, kOuts, kRows, kAsked>(args, out, pass * kRows, pass * kAsked % kOuts);
        }
    }
    for (; out < last; ++out) {
        for (int64_t row = 0; row < args.padded_rows; row += kRows) vnni_tile<W, 1, kRows, 0>(args, out, row, 0);
    }
}

// Outputs [first, last).
template <typename W>
void linear_outs_vnni(const LinearArgs& args, int64_t first, int64_t last) {
    // four outputs share their last steps; rows of x are read again from the first cache
    switch (args.padded_rows) {
        case 1:
            return vnni_tiles<W, 4, 1, 1>(args, first, last);
        case 2:
            return vnni_tiles<W, 4, 2, 1>(args, first, last);
        case 4:
            return vnni_tiles<W, 4, 2, 2>(args, first, last);
        case 8:
            return vnni_tiles<W, 4, 2, 4>(args, first, last);
        default:
            return vnni_tiles<W, 4, 2, 8>(args, first, last);
    }
}
