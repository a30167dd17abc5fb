// The number of zeros among `count` floats.

#include "xyz.h"

extern "C" long count_zeros(const float* values, long count) {
    long zeros = 0;
    for (long index = 0; index < count; ++index) zeros += values[index] == 0.0f;
    return zeros;
}
