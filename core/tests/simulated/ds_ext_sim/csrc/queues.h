// Streams and events of the simulated device, and which device and stream are current.
//
// A stream is a list of jobs that wait. Nothing runs them but somebody who waits: an event, the stream, the device, or
// the next operator on that stream. So work runs as late as the program allows, the same in every run, and what forgot
// to wait sees old values.

#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <string>

namespace sim {

constexpr int kMaxDevices = 8;

inline c10::Device device_at(int index) { return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)}; }

// The device type as torch names it: "sim", unless `torch_sim.install` was told another one.
inline std::string device_name() { return c10::get_privateuse1_backend(); }

int device_count();
void set_device_count(int count);
int current_device();
void set_device(int index);
bool was_used(int index);

c10::StreamId current_stream(int device);
c10::StreamId exchange_stream(int device, c10::StreamId stream);
c10::StreamId new_stream(int device);

// A moment in a stream: after so many jobs.
struct Place {
    int device;
    c10::StreamId stream;
    uint64_t jobs;
};

Place enqueue(int device, c10::StreamId stream, std::function<void()> job);
Place end_of(int device, c10::StreamId stream);
bool is_reached(const Place& place);
void run_to(const Place& place);
void finish_stream(int device, c10::StreamId stream);
void finish_device(int device);
int64_t waiting_jobs(int device);

// Whether jobs wait at all; without it they run at once, and the device is a synchronous one.
void set_late(bool late);

inline void finish_current_stream(int device) { finish_stream(device, current_stream(device)); }

}  // namespace sim
