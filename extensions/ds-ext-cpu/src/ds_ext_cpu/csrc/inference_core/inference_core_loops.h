// The loops of every op of this library: they share a pass, because a pass has one Vec.
#include "activation/gated_loops.h"
#include "linear/linear_loops.h"
