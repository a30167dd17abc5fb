// The loops of every op of this library: they share a pass, because a pass has one Vec.
// clang-format off
#include "activation/gated_loops.h"
#include "attention/decode_loops.h"
#include "linear/linear_loops.h"
#include "norm/norm_loops.h"
#include "rotary/rotary_loops.h"
#include "decoder_layer/decoder_layer_loops.h"
// clang-format on
