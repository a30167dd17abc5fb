// The device as one translation unit: reading torch's headers takes most of a build, and is done once.

#include "arguments.cpp"
#include "fallback.cpp"
#include "hooks.cpp"
#include "kernels.cpp"
#include "memory.cpp"
#include "queues.cpp"
#include "tensors.cpp"
