// Two Vecs of elements that lie together, in any order, and back: for loops in which none asks for its neighbour. bf16
// has its own in vec_avx2.h and vec_avx512.h, which cost less. Included by each_isa.h behind the Vec of each pass.

template <typename T>
DS_CPU_INLINE void load_pair(const T* from, Vec* pair) {
    pair[0] = load(from);
    pair[1] = load(from + Vec::kSize);
}

template <typename T>
DS_CPU_INLINE void store_pair(T* to, const Vec* pair) {
    store(to, pair[0]);
    store(to + Vec::kSize, pair[1]);
}

// Two Vecs of the 2 * kSize elements of a quantized weight. A byte each: in order.
DS_CPU_INLINE void load_pair(const Int8* from, Vec* pair) {
    pair[0] = load(from);
    pair[1] = load(from + Vec::kSize);
}
