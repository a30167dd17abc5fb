// Loops of the quantizer: plain, integer where order matters, without fused multiply-adds, so that every pass gives the
// same bits as the torch reference. Tensors pass through fp32 block by block, in the first cache.

template <typename T>
static void widen_block(const T* x, int64_t count, float* block) {
    for (int64_t i = 0; i < count; ++i) block[i] = widen(x[i]);
}

template <typename T>
static void narrow_block(const float* block, int64_t count, T* out) {
    for (int64_t i = 0; i < count; ++i) out[i] = narrow<T>(block[i]);
}

// Elements [at, at + count) of x as fp32: where they lie, or converted into `block`.
static const float* read_block(Dtype dtype, const void* x, int64_t at, int64_t count, float* block) {
    if (dtype == Dtype::kFp32) return static_cast<const float*>(x) + at;
    if (dtype == Dtype::kBf16) {
        widen_block(static_cast<const Bf16*>(x) + at, count, block);
    } else {
        widen_block(static_cast<const Fp16*>(x) + at, count, block);
    }
    return block;
}

// Where the fp32 numbers of [at, at + count) are to be written: `finish_block` converts them.
static float* place_block(Dtype dtype, void* out, int64_t at, float* block) {
    return dtype == Dtype::kFp32 ? static_cast<float*>(out) + at : block;
}

static void finish_block(Dtype dtype, const float* block, int64_t at, int64_t count, void* out) {
    if (dtype == Dtype::kBf16) narrow_block(block, count, static_cast<Bf16*>(out) + at);
    if (dtype == Dtype::kFp16) narrow_block(block, count, static_cast<Fp16*>(out) + at);
}

// ----- quantize ------------------------------------------------------------------------------------------------------

// The integer orders like the number: negative ones have their magnitude bits turned over. Its own inverse.
DS_CPU_INLINE int32_t order_key(int32_t bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); }
DS_CPU_INLINE float of_key(int32_t key) { return float_of(static_cast<uint32_t>(order_key(key))); }

static Range range_of(const float* x, int64_t count, Range range) {
    for (int64_t i = 0; i < count; ++i) {
        const int32_t key = order_key(static_cast<int32_t>(bits_of(x[i])));
        range.low = key < range.low ? key : range.low;
        range.high = key > range.high ? key : range.high;
    }
    return range;
}

static Range range_of_piece(const GroupArgs& args, int64_t begin, int64_t count) {
    float block[kBlock];
    Range range = {INT32_MAX, INT32_MIN};
    for (int64_t at = begin; at < begin + count; at += kBlock) {
        const int64_t length = begin + count - at < kBlock ? begin + count - at : kBlock;
        range = range_of(read_block(args.dtype, args.x, at, length, block), length, range);
    }
    return range;
}

static Grid grid_of(Range range, int32_t num_bits, bool symmetric) {
    const float tiny = 0x1p-126f;  // the smallest normal number: the scale of a group of zeros
    const float half = static_cast<float>(1 << (num_bits - 1));
    const bool empty = range.low > range.high;
    const float low = empty ? 0.0f : of_key(range.low), high = empty ? 0.0f : of_key(range.high);
    if (symmetric) {
        const float most = low != low ? low : (-low > high ? -low : high);
        float scale = most * static_cast<float>(1.0 / (half - 1));
        scale = scale < tiny ? tiny : scale;
        return {0.0f, 1.0f / scale, 1 - half, half - 1, 0.0f, scale, 0.0f};
    }
    float scale = (high - low) * static_cast<float>(1.0 / (2 * half - 1));
    scale = scale < tiny ? tiny : scale;
    return {low, 1.0f / scale, 0.0f, 2 * half - 1, half, scale, low + half * scale};
}

// q as fp32. Rounded to nearest even: adding 1.5 * 2^23 leaves no bit for a fraction. NaN stays NaN.
DS_CPU_INLINE float level_of(float x, const Grid& grid) {
    float level = (x - grid.shift) * grid.inverse;
    level = level < grid.bottom ? grid.bottom : level;
    level = level > grid.top ? grid.top : level;
    return (level + 0x1.8p23f) - 0x1.8p23f - grid.back;
}

// NaN gives 0.
static void to_int8(const float* x, int64_t count, const Grid grid, int8_t* q) {
    for (int64_t i = 0; i < count; ++i) {
        const float level = level_of(x[i], grid);
        const int32_t integer = static_cast<int32_t>(bits_of(level + 0x1.8p23f)) - 0x4B400000;
        q[i] = static_cast<int8_t>(level == level ? integer : 0);
    }
}

// Two numbers a byte, the first in the low nibble; of an odd count the last high nibble is 0. `q` has room for both.
static void pack_int4(int8_t* q, int64_t count, int8_t* packed) {
    if (count % 2) q[count] = 0;
    for (int64_t i = 0; i < (count + 1) / 2; ++i) {
        uint16_t pair;
        std::memcpy(&pair, q + 2 * i, 2);
        packed[i] = static_cast<int8_t>((pair & 0x0F) | ((pair >> 4) & 0xF0));
    }
}

static void to_fake(const float* x, int64_t count, const Grid grid, float* out) {
    for (int64_t i = 0; i < count; ++i) out[i] = level_of(x[i], grid) * grid.scale + grid.offset;
}

static void convert_block(const GroupArgs& args, int64_t group, int64_t begin, int64_t count, const Grid grid) {
    float wide[kBlock];
    int8_t integers[kBlock];
    const int64_t at = group * args.group_size + begin;
    const float* x = read_block(args.dtype, args.x, at, count, wide);
    if (args.q == nullptr) {
        float* out = place_block(args.dtype, args.out, at, wide);
        to_fake(x, count, grid, out);
        finish_block(args.dtype, out, at, count, args.out);
    } else if (args.num_bits == 8) {
        to_int8(x, count, grid, args.q + at);
    } else {
        to_int8(x, count, grid, integers);
        pack_int4(integers, count, args.q + group * ((args.group_size + 1) / 2) + begin / 2);
    }
}

static void keep_params(const GroupArgs& args, int64_t group, const Grid grid) {
    if (args.params == nullptr) return;
    const int64_t per_group = args.symmetric ? 1 : 2;
    args.params[group * per_group] = grid.scale;
    if (!args.symmetric) args.params[group * per_group + 1] = grid.offset;
}

static Range joined(const Range* ranges, int64_t count) {
    Range all = ranges[0];
    for (int64_t i = 1; i < count; ++i) {
        all.low = ranges[i].low < all.low ? ranges[i].low : all.low;
        all.high = ranges[i].high > all.high ? ranges[i].high : all.high;
    }
    return all;
}

// The range of pieces [first, last), for groups of several.
static void measure_pieces(const GroupArgs& args, int64_t first, int64_t last) {
    for (int64_t number = first; number < last; ++number) {
        const int64_t group = number / args.pieces, begin = number % args.pieces * kPiece;
        const int64_t left = args.group_size - begin;
        args.ranges[number] = range_of_piece(args, group * args.group_size + begin, left < kPiece ? left : kPiece);
    }
}

// Quantizes pieces [first, last). A group of one piece is measured here and converted while it is still in cache.
static void convert_pieces(const GroupArgs& args, int64_t first, int64_t last) {
    for (int64_t number = first; number < last; ++number) {
        const int64_t group = number / args.pieces, begin = number % args.pieces * kPiece;
        const int64_t end = begin + kPiece < args.group_size ? begin + kPiece : args.group_size;
        const Range range = args.pieces == 1 ? range_of_piece(args, group * args.group_size, end)
                                             : joined(args.ranges + group * args.pieces, args.pieces);
        const Grid grid = grid_of(range, args.num_bits, args.symmetric);
        if (begin == 0) keep_params(args, group, grid);
        for (int64_t at = begin; at < end; at += kBlock) {
            convert_block(args, group, at, end - at < kBlock ? end - at : kBlock, grid);
        }
    }
}

// ----- dequantize, and dequantize-reduce -----------------------------------------------------------------------------

static void unpack_int4(const int8_t* packed, int64_t count, int8_t* q) {
    for (int64_t i = 0; i < (count + 1) / 2; ++i) {
        const uint16_t byte = static_cast<uint8_t>(packed[i]);
        const uint16_t pair = static_cast<uint16_t>((byte & 0x0F) | ((byte & 0xF0) << 4));
        std::memcpy(q + 2 * i, &pair, 2);
    }
    for (int64_t i = 0; i < count; ++i) q[i] = static_cast<int8_t>((q[i] ^ 8) - 8);
}

static void to_numbers(const int8_t* q, int64_t count, float scale, float offset, float* out) {
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(q[i]) * scale + offset;
}

static void add_numbers(const int8_t* q, int64_t count, float scale, float offset, float* sum) {
    for (int64_t i = 0; i < count; ++i) sum[i] += static_cast<float>(q[i]) * scale + offset;
}

static void scale_numbers(float* sum, int64_t count, float factor) {
    for (int64_t i = 0; i < count; ++i) sum[i] *= factor;
}

// Numbers [begin, begin + count) of a group: the first copy is written, the others are added.
static void sum_copies(const NumberArgs& args, int64_t group, int64_t begin, int64_t count, float* out) {
    int8_t integers[kBlock];
    if (args.num_copies == 0) {
        for (int64_t i = 0; i < count; ++i) out[i] = 0.0f;
    }
    for (int64_t copy = 0; copy < args.num_copies; ++copy) {
        const int64_t at = copy * args.num_groups + group;
        const float scale = args.params[at * args.num_params];
        const float offset = args.num_params == 2 ? args.params[at * args.num_params + 1] : 0.0f;
        const int8_t* q = args.q + at * args.group_bytes + begin;
        if (args.num_bits == 4) {
            unpack_int4(args.q + at * args.group_bytes + begin / 2, count, integers);
            q = integers;
        }
        if (copy == 0) {
            to_numbers(q, count, scale, offset, out);
        } else {
            add_numbers(q, count, scale, offset, out);
        }
    }
    if (args.factor != 1.0f) scale_numbers(out, count, args.factor);
}

static void dequantize_pieces(const NumberArgs& args, int64_t first, int64_t last) {
    float wide[kBlock];
    for (int64_t number = first; number < last; ++number) {
        const int64_t group = number / args.pieces, start = number % args.pieces * kPiece;
        const int64_t end = start + kPiece < args.group_size ? start + kPiece : args.group_size;
        for (int64_t begin = start; begin < end; begin += kBlock) {
            const int64_t count = end - begin < kBlock ? end - begin : kBlock;
            const int64_t at = group * args.group_size + begin;
            float* out = place_block(args.dtype, args.out, at, wide);
            sum_copies(args, group, begin, count, out);
            finish_block(args.dtype, out, at, count, args.out);
        }
    }
}
