// How much a parameter moves; found by the folder that sycl_kernel_include names.
#pragma once

inline float moved(float param, float grad, double lr) { return param - static_cast<float>(lr) * grad; }
