// Reductions of floating-point numbers; included by each_isa.h once per instruction set.

constexpr int64_t kReduceBlock = 1024;

template <ReduceOp kOp, typename A>
DS_CPU_INLINE A reduced(A a, A b) {
    if constexpr (kOp == ReduceOp::kProduct) return a * b;
    if constexpr (kOp == ReduceOp::kMin) return b < a ? b : a;
    if constexpr (kOp == ReduceOp::kMax) return a < b ? b : a;
    return a + b;
}

template <typename T>
DS_CPU_INLINE auto widened(T value) {
    if constexpr (sizeof(T) == 8) {
        return value;
    } else {
        return widen(value);
    }
}

template <typename T, typename A>
DS_CPU_INLINE T narrowed(A value) {
    if constexpr (sizeof(T) == 8) {
        return value;
    } else {
        return narrow<T>(value);
    }
}

// A block at a time passes through the cache nearest to the core, in the type in which it is added up.
template <typename T, ReduceOp kOp>
static void reduce_range(void* to_bytes, const void* const* sources, int num_sources, int64_t numel) {
    using A = decltype(widened(T{}));
    T* to = static_cast<T*>(to_bytes);
    const A factor = static_cast<A>(num_sources);
    A sums[kReduceBlock];
    for (int64_t start = 0; start < numel; start += kReduceBlock) {
        const int64_t count = numel - start < kReduceBlock ? numel - start : kReduceBlock;
        const T* first = static_cast<const T*>(sources[0]) + start;
        const T* second = static_cast<const T*>(sources[num_sources > 1 ? 1 : 0]) + start;
        if (num_sources == 1) {
            for (int64_t i = 0; i < count; ++i) sums[i] = widened(first[i]);
        } else {
            for (int64_t i = 0; i < count; ++i) sums[i] = reduced<kOp>(widened(first[i]), widened(second[i]));
        }
        for (int source = 2; source < num_sources; ++source) {
            const T* more = static_cast<const T*>(sources[source]) + start;
            for (int64_t i = 0; i < count; ++i) sums[i] = reduced<kOp>(sums[i], widened(more[i]));
        }
        T* part = to + start;
        if constexpr (kOp == ReduceOp::kAverage) {
            for (int64_t i = 0; i < count; ++i) part[i] = narrowed<T>(static_cast<A>(sums[i] / factor));
        } else {
            for (int64_t i = 0; i < count; ++i) part[i] = narrowed<T>(sums[i]);
        }
    }
}
