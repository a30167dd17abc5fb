// Memory of the simulated devices: addresses that the host may not touch, and host addresses of the same bytes.

#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstddef>

namespace sim {

// Where the host reaches what lies at `address` of a device. For the operators of the device, and nobody else.
void* host_address(const void* address);

// The device whose memory `address` is; -1: none.
int device_of(const void* address);

// The block at `address` is used on this stream too: it is not given away before what the stream has been given is
// done.
void record_use(const void* address, int device, c10::StreamId stream);

void set_total_memory(int device, int64_t bytes);

// Page-locked host memory.
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);

}  // namespace sim
