// The library of a step of generation: linear layers of few rows, with plain and quantized weights, the gate of a
// feed-forward layer, and whole layers of a decoder.

#include "activation/gated_args.h"
#include "attention/decode_args.h"
#include "common/half.h"
#include "common/isa.h"
#include "common/rows.h"
#include "decoder_layer/decoder_layer_args.h"
#include "linear/linear_args.h"
#include "norm/norm_args.h"
#include "rotary/rotary_args.h"

#define DS_CPU_LOOPS "inference_core/inference_core_loops.h"
#include "common/each_isa.h"

// These choose among the passes above.
#include "activation/gated.h"
#include "decoder_layer/decoder_layer.h"
#include "linear/linear.h"

STABLE_TORCH_LIBRARY_FRAGMENT(ds_cpu, m) {
    m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
    m.def(
        "packed_linear(Tensor x, Tensor data, Tensor scales, Tensor? zeros, Tensor? bias, int bits, "
        "int input_bits=16) -> Tensor");
    m.def(
        "packed_grouped_linear(Tensor x, Tensor data, Tensor scales, Tensor? zeros, Tensor? bias, int[] counts, "
        "int bits, int input_bits=16) -> Tensor");
    m.def("gated_activation(Tensor gate, Tensor up, int activation) -> Tensor");
    m.def(
        "decoder_layer(Tensor x, Tensor(a!) k_cache, Tensor(b!) v_cache, int length, Tensor? starts, Tensor? cos, "
        "Tensor? sin, Tensor qkv, Tensor? qkv_scales, Tensor? qkv_zeros, Tensor? qkv_bias, Tensor out, "
        "Tensor? out_scales, Tensor? out_zeros, Tensor? out_bias, Tensor up, Tensor? up_scales, Tensor? up_zeros, "
        "Tensor? up_bias, Tensor down, Tensor? down_scales, Tensor? down_zeros, Tensor? down_bias, "
        "Tensor norm_attention, Tensor? norm_attention_bias, Tensor? norm_mlp, Tensor? norm_mlp_bias, "
        "Tensor? norm_query, Tensor? norm_query_bias, Tensor? norm_key, Tensor? norm_key_bias, int[] shape, float eps, "
        "float scale) -> Tensor");
}

// Of every device, so that a tensor of another one is refused by name.
STABLE_TORCH_LIBRARY_IMPL(ds_cpu, CompositeExplicitAutograd, m) {
    m.impl("linear", TORCH_BOX(&ds_cpu::linear));
    m.impl("packed_linear", TORCH_BOX(&ds_cpu::packed_linear));
    m.impl("packed_grouped_linear", TORCH_BOX(&ds_cpu::packed_grouped_linear));
    m.impl("gated_activation", TORCH_BOX(&ds_cpu::gated_activation));
    m.impl("decoder_layer", TORCH_BOX(&ds_cpu::decoder_layer));
}
