// The loop of every optimizer: read a parameter, its gradient and states, apply a rule, write them back. One loop
// serves every mix of dtypes: the branch on a dtype is the same for a whole loop, and costs next to nothing in one that
// waits for memory. Included in each pass, see [Note: three passes] in isa.h.
//
// The last, partial Vec goes through the same operations as the others, so that a result does not depend on where an
// engine cuts its shards.

DS_CPU_INLINE Vec load(const FloatArray& from, int64_t at) {
    if (from.dtype == Dtype::kFp32) return load(static_cast<const float*>(from.data) + at);
    if (from.dtype == Dtype::kBf16) return load(static_cast<const Bf16*>(from.data) + at);
    return load(static_cast<const Fp16*>(from.data) + at);
}

DS_CPU_INLINE Vec load_part(const FloatArray& from, int64_t at, int64_t count) {
    if (from.dtype == Dtype::kFp32) return load_part(static_cast<const float*>(from.data) + at, count);
    if (from.dtype == Dtype::kBf16) return load_part(static_cast<const Bf16*>(from.data) + at, count);
    return load_part(static_cast<const Fp16*>(from.data) + at, count);
}

DS_CPU_INLINE void store(const FloatArray& to, int64_t at, Vec a) {
    if (to.dtype == Dtype::kFp32) return store(static_cast<float*>(to.data) + at, a);
    if (to.dtype == Dtype::kBf16) return store(static_cast<Bf16*>(to.data) + at, a);
    store(static_cast<Fp16*>(to.data) + at, a);
}

DS_CPU_INLINE void store_part(const FloatArray& to, int64_t at, Vec a, int64_t count) {
    if (to.dtype == Dtype::kFp32) return store_part(static_cast<float*>(to.data) + at, a, count);
    if (to.dtype == Dtype::kBf16) return store_part(static_cast<Bf16*>(to.data) + at, a, count);
    store_part(static_cast<Fp16*>(to.data) + at, a, count);
}

// A weight of an interpolation, as torch.lerp rounds it: from the end that is nearer.
struct Weight {
    Vec value;
    bool is_small;
    explicit DS_CPU_INLINE_MEMBER Weight(float weight)
        : value(splat(weight < 0.5f ? weight : weight - 1.0f)), is_small(weight < 0.5f) {}
};

// a + weight * (b - a). Two returns and no `? :` between Vecs, which would choose an address and spill both.
DS_CPU_INLINE Vec lerp(Vec a, Vec b, const Weight& weight) {
    const Vec difference = b - a;
    if (weight.is_small) return fma(weight.value, difference, a);
    return fma(weight.value, difference, b);
}

// A divisor of many numbers, normal and not 0. The quotient is rounded as a division rounds it (P. Markstein, IBM
// Journal of Research and Development 34, 1990: a correctly rounded reciprocal, and one step on the remainder) in half
// the time.
struct Divisor {
    Vec minus_value, reciprocal;
    explicit DS_CPU_INLINE_MEMBER Divisor(float value) : minus_value(splat(-value)), reciprocal(splat(1.0f / value)) {}
};

DS_CPU_INLINE Vec operator/(Vec a, const Divisor& by) {
    const Vec quotient = a * by.reciprocal;
    const Vec remainder = fma(quotient, by.minus_value, a);
    return number_or(fma(remainder, by.reciprocal, quotient), quotient);  // infinity has no remainder
}

// a / b beside a square root, which would keep the one divider of a core busy already: a reciprocal to one last bit or
// two by multiplication (one Newton step). For b from the smallest normal number to 2^126, and infinity.
DS_CPU_INLINE Vec quotient(Vec a, Vec b) {
    const Vec rough = rough_reciprocal(b);
    const Vec better = fma(fma(rough, Vec{-b.value}, splat(1.0f)), rough, rough);
    return a * number_or(better, rough);  // infinity has no Newton step
}

// Elements [begin, end) of one parameter. `Rule` is made of the item's factors; `rule(param, grad, states)` is the
// formula.
template <typename Rule, int kStates, typename Factors>
DS_CPU_INLINE void update_arrays(const UpdateItem<kStates, Factors>& item, FloatArray params, FloatArray grads,
                                 FloatArray copies, int64_t begin, int64_t end) {
    const Rule rule(item.by);
    const Vec grad_scale = splat(item.grad_scale);
    float* all_states[kStates];
    for (int number = 0; number < kStates; ++number) all_states[number] = item.states[number];
    Vec states[kStates];
    int64_t at = begin;
    for (; at + Vec::kSize <= end; at += Vec::kSize) {
        Vec param = load(params, at);
        for (int number = 0; number < kStates; ++number) states[number] = load(all_states[number] + at);
        rule(param, load(grads, at) * grad_scale, states);
        store(params, at, param);
        for (int number = 0; number < kStates; ++number) store(all_states[number] + at, states[number]);
        if (copies.data != nullptr) store(copies, at, param);
    }
    if (at < end) {
        const int64_t count = end - at;
        Vec param = load_part(params, at, count);
        for (int number = 0; number < kStates; ++number) states[number] = load_part(all_states[number] + at, count);
        rule(param, load_part(grads, at, count) * grad_scale, states);
        store_part(params, at, param, count);
        for (int number = 0; number < kStates; ++number) store_part(all_states[number] + at, states[number], count);
        if (copies.data != nullptr) store_part(copies, at, param, count);
    }
}

// As above, with one loop for any mix of dtypes, and one of its own for the mix that most models train with.
template <typename Rule, int kStates, typename Factors>
static void update_range(const UpdateItem<kStates, Factors>& item, int64_t begin, int64_t end) {
    const FloatArray params = item.param, grads = item.grad, copies = item.copy;
    const bool is_mixed = params.dtype == Dtype::kFp32 && grads.dtype == Dtype::kBf16 && copies.dtype == Dtype::kBf16;
    if (is_mixed && copies.data != nullptr) {
        update_arrays<Rule>(item, {params.data, Dtype::kFp32}, {grads.data, Dtype::kBf16}, {copies.data, Dtype::kBf16},
                            begin, end);
    } else {
        update_arrays<Rule>(item, params, grads, copies, begin, end);
    }
}
