// The loops of the library of attention over a cache.
// clang-format off
#include "common/exp_loop.h"
#include "attention/decode_loops.h"
// clang-format on
