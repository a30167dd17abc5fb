// Loops of linear layers of few rows with int8 and int4 weights, in integers. Included behind linear_loops.h in a pass
// of its own.

// [Note: x in 16 bits]
// Of each group of a row of x the greatest |x| becomes 127 * 256, and every number the nearest whole one: off by at
// most 2^-16 of the greatest, where bf16 rounds the result to 2^-9 of itself. q = 256 hi + lo with two signed bytes, so
// that AVX-512's products of bytes, exact and summed in 32 bits, take the weight as it lies. They want it unsigned:
// 128, or 8 with 4 bits, is added to every number of it, and the sums begin with that many sums of the bytes below 0. A
// number that is not finite makes its group's factor NaN; a group below 1e-30 is 0.
// Where x may be rounded to 8 bits, the greatest |x| becomes 127, and q is one byte: half the products.

constexpr int64_t kBytesAtOnce = 64;
template <typename W>
constexpr int64_t kNumbersAtOnce = kBytesAtOnce * Weight<W>::kPerElement;
// What is added to a weight, over lanes of a sum, so that each stays small.
template <typename W>
constexpr int32_t kAddedPerLane = Weight<W>::kPerElement == 1 ? 128 / 16 : 8 / 8;
template <typename W>
constexpr __mmask16 kAddedLanes = Weight<W>::kPerElement == 1 ? 0xFFFF : 0xFF;

// What belongs to one row and group of x: the factor, and with what lanes of the sums of high and of low bytes begin.
struct GroupOfX {
    float factor;
    int32_t high, low;
};

// The parts of the copy of x: for each block the high bytes and the low ones, if there are two, with 4 bits of the even
// numbers first; and the groups.
struct IntegerCopy {
    int8_t* bytes;
    GroupOfX* groups;
};

DS_CPU_INLINE IntegerCopy integer_copy(const LinearArgs& args) {
    float* behind = args.copy + args.padded_rows * args.groups * args.group_stride / 2;
    return {reinterpret_cast<int8_t*>(args.copy), reinterpret_cast<GroupOfX*>(behind)};
}

// As fp32's bits, 32 numbers of which those from `count` on are 0: the first half and the second, or with kEvenOdd
// those at even places and at odd ones.
template <bool kEvenOdd>
DS_CPU_INLINE void load_bits(const Bf16* x, int64_t count, __m512i* pair) {
    __m512i numbers = _mm512_setzero_si512();
    if (count >= 32) {
        numbers = _mm512_loadu_si512(x);
    } else if (count > 0) {
        numbers = _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << count) - 1), x);
    }
    if constexpr (kEvenOdd) {
        pair[0] = _mm512_slli_epi32(numbers, 16);
        pair[1] = _mm512_and_si512(numbers, _mm512_set1_epi32(static_cast<int32_t>(0xFFFF0000u)));
    } else {
        pair[0] = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(numbers)), 16);
        pair[1] = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(numbers, 1)), 16);
    }
}

template <bool kEvenOdd>
DS_CPU_INLINE void load_bits(const float* x, int64_t count, __m512i* pair) {
    for (int half = 0; half < 2; ++half, count -= 16) {
        const auto mask = static_cast<__mmask16>(count >= 16 ? 0xFFFF : count > 0 ? (1 << count) - 1 : 0);
        pair[half] = _mm512_maskz_loadu_epi32(mask, x + 16 * half);
    }
    if constexpr (kEvenOdd) {
        const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        const __m512i first = pair[0];
        pair[0] = _mm512_permutex2var_epi32(first, even, pair[1]);
        pair[1] = _mm512_permutex2var_epi32(first, _mm512_add_epi32(even, _mm512_set1_epi32(1)), pair[1]);
    }
}

// 16 numbers as whole ones, in kPlanes bytes each, the low one 64 bytes behind the high one; added to `sums`.
template <int kPlanes>
DS_CPU_INLINE void store_whole(__m512i numbers, __m512 inverse, int8_t* to, __m512i* sums) {
    const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(numbers), inverse));
    const __m512i top = kPlanes == 1 ? q : _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
    sums[0] = _mm512_add_epi32(sums[0], top);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(top));
    if constexpr (kPlanes == 2) {
        sums[1] = _mm512_add_epi32(sums[1], _mm512_sub_epi32(q, _mm512_slli_epi32(top, 8)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 64), _mm512_cvtepi32_epi8(q));
    }
}

template <typename X>
DS_CPU_INLINE uint32_t greatest_bits(const X* x, int64_t count) {
    __m512i most = _mm512_setzero_si512(), pair[2];
    const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
    for (int64_t i = 0; i < count; i += 32) {
        load_bits<true>(x + i, count - i, pair);
        for (const __m512i& half : pair) most = _mm512_max_epu32(most, _mm512_and_si512(half, magnitude));
    }
    return _mm512_reduce_max_epu32(most);
}

// One group of one row. `bytes`: kPlanes * args.group_stride of them. Returns the sum of the numbers as they are then.
template <typename X, typename W, int kPlanes>
DS_CPU_INLINE float copy_group(const X* x, int64_t count, int64_t stride, int8_t* bytes, GroupOfX* group) {
    constexpr bool kEvenOdd = Weight<W>::kPerElement == 2;
    constexpr float kMost = kPlanes == 2 ? 127.0f * 256.0f : 127.0f;
    const uint32_t bits = greatest_bits(x, count);
    const float greatest = float_of(bits);
    const bool is_used = bits < 0x7F800000u && greatest >= 1e-30f;
    const __m512 inverse = _mm512_set1_ps(is_used ? kMost / greatest : 0.0f);
    *group = {bits >= 0x7F800000u ? __builtin_nanf("") : is_used ? greatest / kMost : 0.0f, 0, 0};
    if (!is_used) {
        std::memset(bytes, 0, kPlanes * stride);
        return group->factor;
    }
    __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()}, pair[2];
    for (int64_t i = 0; i < stride; i += 32) {
        load_bits<kEvenOdd>(x + i, count - i, pair);
        int8_t* block = bytes + i / kNumbersAtOnce<W> * kPlanes * kNumbersAtOnce<W>;
        const int64_t at = i % kNumbersAtOnce<W>;
        store_whole<kPlanes>(pair[0], inverse, block + (kEvenOdd ? at / 2 : at), sums);
        store_whole<kPlanes>(pair[1], inverse, block + (kEvenOdd ? kPlanes * 64 + at / 2 : at + 16), sums);
    }
    const int32_t high = _mm512_reduce_add_epi32(sums[0]), low = _mm512_reduce_add_epi32(sums[1]);
    group->high = -kAddedPerLane<W> * high;
    group->low = -kAddedPerLane<W> * low;
    return group->factor * (kPlanes == 1 ? 1.0f * high : 256.0f * high + low);
}

template <typename X, typename W, int kPlanes>
DS_CPU_INLINE void copy_integers(const LinearArgs& args) {
    const IntegerCopy copy = integer_copy(args);
    for (int64_t row = 0; row < args.padded_rows; ++row) {
        for (int64_t group = 0; group < args.groups; ++group) {
            const int64_t at = row * args.groups + group;
            int8_t* bytes = copy.bytes + at * kPlanes * args.group_stride;
            float sum = 0.0f;
            if (row < args.rows) {
                const X* x = static_cast<const X*>(args.x) + at * args.group_size;
                sum = copy_group<X, W, kPlanes>(x, args.group_size, args.group_stride, bytes, copy.groups + at);
            } else {
                std::memset(bytes, 0, kPlanes * args.group_stride);
                copy.groups[at] = {0.0f, 0, 0};
            }
            if (args.sums != nullptr) args.sums[at] = sum;
        }
    }
}

template <typename W, int kPlanes>
void prepare_linear_vnni(const LinearArgs& args) {
    if (args.dtype == Dtype::kBf16) return copy_integers<Bf16, W, kPlanes>(args);
    if constexpr (kPlanes == 1) copy_integers<float, W, kPlanes>(args);
}

// Products of 64 bytes of kOuts rows of the weight with kRows rows of x; `step` bytes from one row of x to the next.
template <typename W, int kOuts, int kRows, int kPlanes>
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
            const int8_t* from = x + row * step + part * kPlanes * 64;
            const __m512i top = _mm512_load_si512(from);
#pragma GCC unroll 4
            for (int out = 0; out < kOuts; ++out) {
                high[out][row] = _mm512_dpbusd_epi32(high[out][row], parts[out][part], top);
            }
            if constexpr (kPlanes == 2) {
                const __m512i rest = _mm512_load_si512(from + 64);
#pragma GCC unroll 4
                for (int out = 0; out < kOuts; ++out) {
                    low[out][row] = _mm512_dpbusd_epi32(low[out][row], parts[out][part], rest);
                }
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

DS_CPU_INLINE void store_four(float* to, __m128 values) { _mm_storeu_ps(to, values); }

// kOuts outputs, from `out` on, of kRows rows of x, from `row` on; of a later tile kAsked outputs are asked for, from
// `asked` on.
template <typename X, typename W, int kOuts, int kRows, int kPlanes, int kAsked>
DS_CPU_INLINE void vnni_tile(const LinearArgs& args, int64_t out, int64_t row, int64_t asked) {
    const IntegerCopy copy = integer_copy(args);
    const int64_t row_bytes = args.groups * args.group_bytes, step = args.groups * kPlanes * args.group_stride;
    const int64_t whole = args.group_bytes / kBytesAtOnce, left = args.group_bytes % kBytesAtOnce;
    constexpr int64_t kStep = kPlanes * kNumbersAtOnce<W>;
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
        const int8_t* x = copy.bytes + (row * args.groups + group) * kPlanes * args.group_stride;
        __m512i high[kOuts][kRows], low[kOuts][kRows];
        const GroupOfX* of_x = copy.groups + row * args.groups + group;
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const __m512i top = _mm512_maskz_set1_epi32(kAddedLanes<W>, of_x[r * args.groups].high);
            const __m512i rest = _mm512_maskz_set1_epi32(kAddedLanes<W>, of_x[r * args.groups].low);
#pragma GCC unroll 4
            for (int o = 0; o < kOuts; ++o) high[o][r] = top, low[o][r] = rest;
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
            add_integers<W, kOuts, kRows, kPlanes>(weights, x + block * kStep, step, high, low);
        }
        if (left > 0) {
            const auto mask = static_cast<__mmask64>((uint64_t{1} << left) - 1);
#pragma GCC unroll 4
            for (int o = 0; o < kOuts; ++o) {
                weights[o] = _mm512_maskz_loadu_epi8(mask, weight + o * row_bytes + whole * kBytesAtOnce);
            }
            add_integers<W, kOuts, kRows, kPlanes>(weights, x + whole * kStep, step, high, low);
        }
#pragma GCC unroll 4
        for (int o = 0; o < kOuts; ++o) {
            const float scale = args.scales[(out + o) * args.groups + group];
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                const Vec tops{_mm512_cvtepi32_ps(high[o][r])};
                const Vec sum = kPlanes == 1 ? tops : fma(tops, splat(256), {_mm512_cvtepi32_ps(low[o][r])});
                if (args.groups == 1) {  // is scaled once it is one number
                    totals[o][r] = sum;
                } else {
                    totals[o][r] = fma(sum * splat(of_x[r * args.groups].factor), splat(scale), totals[o][r]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
        if (row + r >= args.rows) break;
        float results[kOuts];
        const float factor = args.groups == 1 ? copy.groups[row + r].factor : 1.0f;
        X* const y = static_cast<X*>(args.y) + (row + r) * args.outs + out;
        if constexpr (kOuts == 4) {
            if (args.groups == 1 && args.zeros == nullptr) {
                const __m128 sums = sums_of_four(totals[0][r], totals[1][r], totals[2][r], totals[3][r]);
                const __m128 scales = _mm_loadu_ps(args.scales + out);
                const __m128 bias = args.bias == nullptr ? _mm_setzero_ps() : _mm_loadu_ps(args.bias + out);
                store_four(y, _mm_fmadd_ps(_mm_mul_ps(sums, _mm_set1_ps(factor)), scales, bias));
                continue;
            }
        }
        for (int o = 0; o < kOuts; ++o) {  // in the order of four, so that it does not matter where they begin
            const float scale = args.groups == 1 ? args.scales[out + o] : 1.0f;
            const float rest = offsets[o][r] + (args.bias == nullptr ? 0.0f : args.bias[out + o]);
            const float sum = _mm_cvtss_f32(sums_of_four(totals[o][r], splat(0), splat(0), splat(0)));
            results[o] = __builtin_fmaf(sum * factor, scale, rest);
        }
        for (int o = 0; o < kOuts; ++o) y[o] = narrow<X>(results[o]);
    }
}

template <typename X, typename W, int kRows, int kPlanes, int kAsked>
static void vnni_tiles(const LinearArgs& given, int64_t first, int64_t last) {
    constexpr int kOuts = 4;  // share their last steps
    LinearArgs args = given;
    args.prefetch_bytes = prefetch_bytes(kOuts * args.groups * args.group_bytes);
    int64_t out = first;
    for (; out + kOuts <= last; out += kOuts) {
        for (int64_t row = 0, asked = 0; row < args.padded_rows; row += kRows, asked += kAsked) {
            vnni_tile<X, W, kOuts, kRows, kPlanes, kAsked>(args, out, row, asked % kOuts);
        }
    }
    for (; out < last; ++out) {
        for (int64_t row = 0; row < args.padded_rows; row += kRows) {
            vnni_tile<X, W, 1, kRows, kPlanes, 0>(args, out, row, 0);
        }
    }
}

// Rows of x are read again from the first cache; sums and totals of four outputs fit the registers.
template <typename X, typename W, int kPlanes>
DS_CPU_INLINE void vnni_outs_of(const LinearArgs& args, int64_t first, int64_t last) {
    if (args.padded_rows == 1) return vnni_tiles<X, W, 1, kPlanes, 4>(args, first, last);
    if constexpr (kPlanes == 1) {
        if (args.groups == 1 && args.padded_rows >= 4) {
            if (args.padded_rows == 4) return vnni_tiles<X, W, 4, kPlanes, 4>(args, first, last);
            if (args.padded_rows == 8) return vnni_tiles<X, W, 4, kPlanes, 2>(args, first, last);
            return vnni_tiles<X, W, 4, kPlanes, 1>(args, first, last);
        }
    }
    if (args.padded_rows == 2) return vnni_tiles<X, W, 2, kPlanes, 4>(args, first, last);
    if (args.padded_rows == 4) return vnni_tiles<X, W, 2, kPlanes, 2>(args, first, last);
    vnni_tiles<X, W, 2, kPlanes, 1>(args, first, last);
}

// Outputs [first, last).
template <typename W, int kPlanes>
void linear_outs_vnni(const LinearArgs& args, int64_t first, int64_t last) {
    if (args.dtype == Dtype::kBf16) return vnni_outs_of<Bf16, W, kPlanes>(args, first, last);
    if constexpr (kPlanes == 1) vnni_outs_of<float, W, kPlanes>(args, first, last);
}
