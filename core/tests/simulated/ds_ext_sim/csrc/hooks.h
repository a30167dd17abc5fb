// Random numbers of the simulated device.

#pragma once

#include <ATen/core/Generator.h>

namespace sim {

// The generator of a device: what its operators draw from when none is given.
const at::Generator& default_generator(int device);

// The generator of the host that `generator`, one of a simulated device, draws from.
at::Generator host_generator(const at::Generator& generator);

}  // namespace sim
