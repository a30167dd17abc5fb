// The loops of every op of this library: they share a pass, because a pass has one Vec.
#include "activation/gelu_loops.h"
#include "norm/norm_loops.h"
#include "rotary/rotary_loops.h"
