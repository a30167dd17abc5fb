// Loops of the gated activation: blocks pass through fp32 in the first cache, so that one loop serves every dtype.
#include "activation/gelu_loops.h"
#include "common/exp_loop.h"

static void silu_block(float* __restrict x, int64_t count) {
    for (int64_t i = 0; i < count; ++i) x[i] = x[i] / (1.0f + exp_of(-x[i]));
}

template <typename T>
static void gated_block(const T* __restrict gate, const T* __restrict up, int64_t count, Gate form, T* __restrict out) {
    float block[kGatedBlock];
    for (int64_t i = 0; i < count; ++i) block[i] = widen(gate[i]);
    switch (form) {
        case Gate::kSilu:
            silu_block(block, count);
            break;
        case Gate::kGelu:
            gelu_row<false>(static_cast<const float*>(block), nullptr, count, GeluCurves<float>::kErf, block);
            break;
        case Gate::kGeluTanh:
            gelu_row<false>(static_cast<const float*>(block), nullptr, count, GeluCurves<float>::kTanh, block);
            break;
    }
    for (int64_t i = 0; i < count; ++i) out[i] = narrow<T>(block[i] * widen(up[i]));
}

// Blocks [first, last) of all rows.
template <typename T>
void gated_blocks(const GatedArgs& args, int64_t first, int64_t last) {
    const int64_t blocks = (args.cols + kGatedBlock - 1) / kGatedBlock;
    for (int64_t at = first; at < last; ++at) {
        const int64_t row = at / blocks, begin = at % blocks * kGatedBlock;
        const int64_t count = args.cols - begin < kGatedBlock ? args.cols - begin : kGatedBlock;
        gated_block(static_cast<const T*>(args.gate) + row * args.gate_stride + begin,
                    static_cast<const T*>(args.up) + row * args.up_stride + begin, count, args.gate_form,
                    static_cast<T*>(args.out) + row * args.cols + begin);
    }
}
