// Loops of linear layers of few rows; see [Note: a linear layer of few rows].

// The kind of weight W: float, Bf16, Int8 or Int4Pair.
template <typename W>
struct Weight {
    static constexpr int64_t kPerElement = 1;  // numbers in an element of memory
    static constexpr bool kScaled = false;
    static constexpr bool kEvenOdd = false;  // order in which load_pair gives them
};
template <>
struct Weight<Bf16> {
    static constexpr int64_t kPerElement = 1;
    static constexpr bool kScaled = false;
    static constexpr bool kEvenOdd = true;
};
template <>
struct Weight<Int8> {
    static constexpr int64_t kPerElement = 1;
    static constexpr bool kScaled = true;
    static constexpr bool kEvenOdd = false;
};
template <>
struct Weight<Int4Pair> {
    static constexpr int64_t kPerElement = 2;
    static constexpr bool kScaled = true;
    static constexpr bool kEvenOdd = true;
};

// How products are made. `kBlock` numbers of a weight are two registers; x is copied as numbers of type X.
struct Fp32Products {
    using X = float;
    using Register = Vec;
    static constexpr int64_t kBlock = 2 * Vec::kSize;
    template <typename W>
    static constexpr bool kEvenOdd = Weight<W>::kEvenOdd;
    template <typename W>
    static DS_CPU_INLINE_MEMBER void load_weights(const W* from, Vec* pair) {
        load_pair(from, pair);
    }
    static DS_CPU_INLINE_MEMBER Vec load_x(const float* from) { return load(from); }
    static DS_CPU_INLINE_MEMBER Vec add(Vec sum, Vec weight, Vec x) { return fma(weight, x, sum); }
    template <typename T>
    static DS_CPU_INLINE_MEMBER float to_x(T number) {
        return widen(number);
    }
};

// Rows of x whose sums are in registers at once, with 16 sums where there are 32 registers, 8 where there are 16. With
// twice the rows and half the outputs x would be loaded twice as often, and of wide layers leave the first cache.
constexpr int64_t kMostAtOnce = 4;

DS_CPU_INLINE int64_t rows_at_once(const LinearArgs& args) {
    return args.padded_rows < kMostAtOnce ? args.padded_rows : kMostAtOnce;
}

// ----- the copy of x -------------------------------------------------------------------------------------------------

template <typename T>
static float sum_of(const T* x, int64_t count) {
    Vec sum = splat(0);
    int64_t i = 0;
    for (; i + Vec::kSize <= count; i += Vec::kSize) sum = sum + load(x + i);
    if (i < count) sum = sum + load_part(x + i, count - i);
    return sum_of_lanes(sum);
}

// One block of one row: `count` numbers, the rest of it zeros.
template <typename P, typename W, typename T>
DS_CPU_INLINE void copy_block(const T* x, int64_t count, typename P::X* copy) {
    constexpr int64_t kHalf = P::kBlock / 2;
    constexpr bool kEvenOdd = P::template kEvenOdd<W>;
    if (count == P::kBlock) {
        for (int64_t lane = 0; lane < kHalf; ++lane) {
            copy[lane] = P::to_x(x[kEvenOdd ? 2 * lane : lane]);
            copy[kHalf + lane] = P::to_x(x[kEvenOdd ? 2 * lane + 1 : kHalf + lane]);
        }
        return;
    }
    std::memset(copy, 0, P::kBlock * sizeof(typename P::X));
    for (int64_t i = 0; i < count; ++i) copy[kEvenOdd ? i / 2 + i % 2 * kHalf : i] = P::to_x(x[i]);
}

template <typename P, typename W, typename T>
static void copy_rows(const LinearArgs& args) {
    const int64_t at_once = rows_at_once(args), step = at_once * P::kBlock;
    for (int64_t row = 0; row < args.rows; ++row) {
        auto* copy = reinterpret_cast<typename P::X*>(args.copy);
        copy += row / at_once * at_once * args.groups * args.group_stride + row % at_once * P::kBlock;
        const T* x = static_cast<const T*>(args.x) + row * args.groups * args.group_size;
        for (int64_t group = 0; group < args.groups; ++group, x += args.group_size) {
            auto* to = copy + group * args.group_stride * at_once;
            for (int64_t at = 0; at < args.group_size; at += P::kBlock, to += step) {
                copy_block<P, W, T>(x + at, args.group_size - at < P::kBlock ? args.group_size - at : P::kBlock, to);
            }
            if (args.sums != nullptr) args.sums[row * args.groups + group] = sum_of(x, args.group_size);
        }
    }
}

template <typename P>
static void clear_padding(const LinearArgs& args) {
    if (args.rows == args.padded_rows) return;
    std::memset(args.copy, 0, args.padded_rows * args.groups * args.group_stride * sizeof(typename P::X));
    if (args.sums != nullptr) std::memset(args.sums, 0, args.padded_rows * args.groups * sizeof(float));
}

template <typename W>
void prepare_linear(const LinearArgs& args) {
    clear_padding<Fp32Products>(args);
    switch (args.dtype) {
        case Dtype::kFp32:
            copy_rows<Fp32Products, W, float>(args);
            break;
        case Dtype::kBf16:
            copy_rows<Fp32Products, W, Bf16>(args);
            break;
        case Dtype::kFp16:
            copy_rows<Fp32Products, W, Fp16>(args);
            break;
    }
}

// How far ahead of its use a weight is asked for: the same place of a later tile, so that every line is asked for once.
// Measured by benchmarks/inference_kernels.py: with half of kPrefetchBytes the loop waits, with twice it is slower
// again.
constexpr int64_t kPrefetchBytes = 4096;

DS_CPU_INLINE int64_t prefetch_bytes(int64_t tile_bytes) {
    return tile_bytes == 0 ? 0 : (kPrefetchBytes + tile_bytes - 1) / tile_bytes * tile_bytes;
}

// ----- the products --------------------------------------------------------------------------------------------------

static void store_number(Dtype dtype, void* y, int64_t at, float value) {
    switch (dtype) {
        case Dtype::kFp32:
            static_cast<float*>(y)[at] = value;
            break;
        case Dtype::kBf16:
            static_cast<Bf16*>(y)[at] = narrow<Bf16>(value);
            break;
        case Dtype::kFp16:
            static_cast<Fp16*>(y)[at] = narrow<Fp16>(value);
            break;
    }
}

// Sums of one output and row that do not wait for each other's additions: four where there is one output and row, two
// where there are few, one where they fill the registers.
template <int kOuts, int kRows>
constexpr int kChains = kOuts * kRows == 1  ? 4
                        : kOuts * kRows > 8 ? 1
                                            : 2;

// kOuts rows of the weight by kRows rows of x, over one block; into the sums of chain `kFirst` and the next.
template <typename P, int kOuts, int kRows, int kFirst = 0>
DS_CPU_INLINE void add_products(const typename P::Register (*weights)[2], const typename P::X* x,
                                Vec (*sums)[kRows][kChains<kOuts, kRows>]) {
    constexpr int kSecond = kChains<kOuts, kRows> == 1 ? 0 : kFirst + 1;
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
        const auto first = P::load_x(x + row * P::kBlock), second = P::load_x(x + row * P::kBlock + P::kBlock / 2);
#pragma GCC unroll 4
        for (int out = 0; out < kOuts; ++out) {
            sums[out][row][kFirst] = P::add(sums[out][row][kFirst], weights[out][0], first);
            sums[out][row][kSecond] = P::add(sums[out][row][kSecond], weights[out][1], second);
        }
    }
}

// Of a block of a weight.
template <typename P, typename W>
constexpr int64_t kBytes = P::kBlock / Weight<W>::kPerElement * static_cast<int64_t>(sizeof(W));

// One block of kOuts rows of the weight, `row_bytes` from one to the next; kAsked of them are asked for `ahead`.
template <typename P, typename W, int kOuts, int kAsked>
DS_CPU_INLINE void load_weights(const uint8_t* at, int64_t row_bytes, int64_t ahead,
                                typename P::Register (*weights)[2]) {
#pragma GCC unroll 4
    for (int out = 0; out < kOuts; ++out) {
        const uint8_t* from = at + out * row_bytes;
#pragma GCC unroll 2
        for (int64_t line = 0; line < kBytes<P, W> && out < kAsked; line += 64) {
            __builtin_prefetch(from + ahead + line, 0, 2);
        }
        P::load_weights(reinterpret_cast<const W*>(from), weights[out]);
    }
}

// Sums over one group: the registers of a tile, kept there by loops that are unrolled whole.
template <typename P, typename W, int kOuts, int kRows, int kAsked>
DS_CPU_INLINE void sum_group(const LinearArgs& args, const uint8_t* weight, const typename P::X* x, int64_t ahead,
                             Vec (*totals)[kRows]) {
    constexpr int kSums = kChains<kOuts, kRows>;
    constexpr int64_t kOneBlock = kBytes<P, W>;
    constexpr int64_t kStep = kRows * P::kBlock;
    const int64_t row_bytes = args.groups * args.group_bytes;
    const int64_t whole = args.group_bytes / kOneBlock, left = args.group_bytes % kOneBlock;
    typename P::Register weights[kOuts][2];
    Vec sums[kOuts][kRows][kSums];
#pragma GCC unroll 4
    for (int out = 0; out < kOuts; ++out) {
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
            for (int chain = 0; chain < kSums; ++chain) sums[out][row][chain] = splat(0);
        }
    }
    int64_t block = 0;
    if constexpr (kSums == 4) {
        for (; block + 2 <= whole; block += 2) {
            load_weights<P, W, kOuts, kAsked>(weight + block * kOneBlock, row_bytes, ahead, weights);
            add_products<P, kOuts, kRows>(weights, x + block * kStep, sums);
            load_weights<P, W, kOuts, kAsked>(weight + (block + 1) * kOneBlock, row_bytes, ahead, weights);
            add_products<P, kOuts, kRows, 2>(weights, x + (block + 1) * kStep, sums);
        }
    }
    for (; block < whole; ++block) {
        load_weights<P, W, kOuts, kAsked>(weight + block * kOneBlock, row_bytes, ahead, weights);
        add_products<P, kOuts, kRows>(weights, x + block * kStep, sums);
    }
    if (left > 0) {
        alignas(64) uint8_t last[kOuts * kOneBlock] = {};
        for (int out = 0; out < kOuts; ++out) {
            std::memcpy(last + out * kOneBlock, weight + out * row_bytes + whole * kOneBlock, left);
        }
        load_weights<P, W, kOuts, 0>(last, kOneBlock, 0, weights);
        add_products<P, kOuts, kRows>(weights, x + whole * kStep, sums);
    }
#pragma GCC unroll 4
    for (int out = 0; out < kOuts; ++out) {
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
            const Vec* own = sums[out][row];
            if constexpr (kSums == 1) totals[out][row] = own[0];
            if constexpr (kSums == 2) totals[out][row] = own[0] + own[1];
            if constexpr (kSums == 4) totals[out][row] = (own[0] + own[1]) + (own[2] + own[3]);
        }
    }
}

static float dot(const float* a, const float* b, int64_t count) {
    Vec sum = splat(0);
    int64_t i = 0;
    for (; i + Vec::kSize <= count; i += Vec::kSize) sum = fma(load(a + i), load(b + i), sum);
    if (i < count) sum = fma(load_part(a + i, count - i), load_part(b + i, count - i), sum);
    return sum_of_lanes(sum);
}

// What the zeros of asymmetric groups add: to each group its zero times the sum of x there.
template <int kOuts, int kRows>
static void add_zeros(const LinearArgs& args, int64_t out, int64_t row, float (*offsets)[kRows]) {
    for (int o = 0; o < kOuts; ++o) {
        const float* zeros = args.zeros + (out + o) * args.groups;
        for (int r = 0; r < kRows; ++r) offsets[o][r] = dot(zeros, args.sums + (row + r) * args.groups, args.groups);
    }
}

// kOuts outputs, from `out` on, of kRows rows of x, from `row` on; of a later tile kAsked outputs are asked for, from
// `asked` on.
template <typename P, typename W, int kOuts, int kRows, int kAsked>
DS_CPU_INLINE void linear_tile(const LinearArgs& args, int64_t out, int64_t row, int64_t asked) {
    const int64_t ahead = args.prefetch_bytes + asked * args.groups * args.group_bytes;
    const uint8_t* weight = args.weight + out * args.groups * args.group_bytes;
    const auto* x = reinterpret_cast<const typename P::X*>(args.copy) + row * args.groups * args.group_stride;
    Vec totals[kOuts][kRows];
    float offsets[kOuts][kRows] = {};
    if constexpr (Weight<W>::kScaled) {
#pragma GCC unroll 4
        for (int o = 0; o < kOuts; ++o) {
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) totals[o][r] = splat(0);
        }
        for (int64_t group = 0; group < args.groups; ++group) {
            Vec sums[kOuts][kRows];
            sum_group<P, W, kOuts, kRows, kAsked>(args, weight + group * args.group_bytes,
                                                  x + group * args.group_stride * kRows, ahead, sums);
            const float* scales = args.scales + out * args.groups + group;
#pragma GCC unroll 4
            for (int o = 0; o < kOuts; ++o) {
                const Vec scale = splat(scales[o * args.groups]);
#pragma GCC unroll 8
                for (int r = 0; r < kRows; ++r) totals[o][r] = fma(sums[o][r], scale, totals[o][r]);
            }
        }
        if (args.zeros != nullptr) add_zeros<kOuts, kRows>(args, out, row, offsets);
    } else {
        sum_group<P, W, kOuts, kRows, kAsked>(args, weight, x, ahead, totals);
    }
    float results[kOuts][kRows];
#pragma GCC unroll 4
    for (int o = 0; o < kOuts; ++o) {
        if constexpr (kRows % 4 == 0) {
#pragma GCC unroll 2
            for (int r = 0; r < kRows; r += 4) sums_of_four(totals[o] + r, results[o] + r);
        } else {
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) results[o][r] = sum_of_lanes(totals[o][r]);
        }
    }
    for (int o = 0; o < kOuts; ++o) {
        const float bias = args.bias == nullptr ? 0.0f : args.bias[out + o];
        for (int r = 0; r < kRows && row + r < args.rows; ++r) {
            store_number(args.dtype, args.y, (row + r) * args.outs + out + o, results[o][r] + offsets[o][r] + bias);
        }
    }
}

// Where the rows of x take several passes over a tile, each asks for a part of the later one: all at once, they would
// wait for one another in the first pass, and memory would rest in the others.
constexpr int asked_in_a_pass(int outs, int passes) { return outs > passes ? outs / passes : 1; }

template <typename P, typename W, int kOuts, int kRows, int kPasses = 1>
static void linear_tiles(const LinearArgs& given, int64_t first, int64_t last) {
    LinearArgs args = given;
    // one row of a weight after the other is one long stream
    args.prefetch_bytes = kOuts == 1 ? kPrefetchBytes : prefetch_bytes(kOuts * args.groups * args.group_bytes);
    constexpr int kAsked = asked_in_a_pass(kOuts, kPasses);
    int64_t out = first;
    for (; out + kOuts <= last; out += kOuts) {
        for (int64_t pass = 0; pass < kPasses; ++pass) {
            linear_tile<P, W, kOuts, kRows, kAsked>(args, out, pass * kRows, pass * kAsked % kOuts);
        }
    }
    for (; out < last; ++out) {
        for (int64_t row = 0; row < args.padded_rows; row += kRows) linear_tile<P, W, 1, kRows, 1>(args, out, row, 0);
    }
}

// Outputs [first, last).
template <typename P, typename W>
DS_CPU_INLINE void linear_outs_of(const LinearArgs& args, int64_t first, int64_t last) {
    constexpr int kOuts = Vec::kSize < 16 ? 2 : 4;
    switch (args.padded_rows) {
        case 1:
            // int4 is bound by its unpacking, which shares loads of x; the others by one stream of memory
            return linear_tiles<P, W, Weight<W>::kPerElement == 2 ? 4 : 1, 1>(args, first, last);
        case 2:
            return linear_tiles<P, W, 4, 2>(args, first, last);
        case 4:
            return linear_tiles<P, W, kOuts, 4>(args, first, last);
        case 8:
            return linear_tiles<P, W, kOuts, 4, 2>(args, first, last);
        default:
            return linear_tiles<P, W, kOuts, 4, 4>(args, first, last);
    }
}

template <typename W>
void linear_outs(const LinearArgs& args, int64_t first, int64_t last) {
    linear_outs_of<Fp32Products, W>(args, first, last);
}
