// Streams and events of the simulated device, and which device and stream are current.
//
// A stream is a list of jobs that wait: operators, copies, waits for other streams. In what order the jobs of several
// streams run is decided by a schedule, the same in every run:
//
//   late     nothing runs until somebody waits: for an event, a stream, the device, or for a value that the host reads.
//            What does not wait for another stream sees old values.
//   early    the same for default streams; a side stream runs ahead as far as the events allow that it waits for.
//            What a side stream does not wait for has not happened yet.
//   ordered  the host is ahead as with `late`, and the device itself runs all streams in the order of the program.
//   none     every job runs at once: a synchronous device.

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

// A job that fails raises where it runs, that is, at whoever waits; the jobs behind it still run.
Place enqueue(int device, c10::StreamId stream, std::function<void()> job);
void enqueue_wait(int device, c10::StreamId stream, const Place& until);
Place end_of(int device, c10::StreamId stream);
bool is_reached(const Place& place);
void run_to(const Place& place);
void finish_stream(int device, c10::StreamId stream);
void finish_device(int device);
int64_t waiting_jobs(int device);

enum class Schedule { kLate, kEarly, kOrdered, kNone };

// All work that waits is done first.
void set_schedule(Schedule schedule);

// The host waits for a device, or would: a value is read, a copy is not asynchronous, a stream is synchronized.
void count_host_wait();
int64_t host_waits();

inline void finish_current_stream(int device) { finish_stream(device, current_stream(device)); }

// An operator or a copy is asked of `device`: fails when the device is lost, and loses it when its time has come.
void count_operation(int device);

// Fails when the device is lost.
void check_not_lost(int device);

// After so many more operations `device` is lost, and what waits then is never done; negative: it is well again.
void lose_device(int device, int64_t operations);

}  // namespace sim
