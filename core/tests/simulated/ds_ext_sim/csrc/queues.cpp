#include "queues.h"

#include <c10/core/DeviceCapability.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "memory.h"

namespace sim {

namespace {

// Where the oldest job runs, although nobody waits: the queues of real devices are not endless either.
constexpr size_t kMaxWaiting = 1 << 14;

struct Job {
    std::function<void()> run;
    std::optional<Place> after;  // it waits for this, and does nothing itself
};

struct Queue {
    std::deque<Job> jobs;
    uint64_t given = 0;
    uint64_t done = 0;
};

struct State {
    std::recursive_mutex mutex;  // a job may wait for another stream
    int count = 2;
    Schedule schedule = Schedule::kLate;
    bool advancing = false;
    std::array<bool, kMaxDevices> used{};
    std::array<std::vector<std::unique_ptr<Queue>>, kMaxDevices> queues;
    std::array<int64_t, kMaxDevices> operations_left;  // negative: no end

    State() { operations_left.fill(-1); }
};

State& state() {
    static State* leaked = new State();  // streams are destroyed by whoever comes last at exit
    return *leaked;
}

using Guard = std::lock_guard<std::recursive_mutex>;

Queue& queue_of(int device, c10::StreamId stream) {
    auto& queues = state().queues[device];
    while (static_cast<c10::StreamId>(queues.size()) <= stream) queues.push_back(std::make_unique<Queue>());
    return *queues[stream];
}

thread_local int tls_device = 0;
thread_local std::array<c10::StreamId, kMaxDevices> tls_streams{};

void check(int index) {
    TORCH_CHECK(index >= 0 && index < device_count(), device_at(index), " does not exist: there are ", device_count(),
                " simulated devices");
}

}  // namespace

int device_count() { return state().count; }

void set_device_count(int count) {
    TORCH_CHECK(count >= 0 && count <= kMaxDevices, "0 to ", kMaxDevices, " simulated devices are possible");
    state().count = count;
}

int current_device() { return tls_device; }

void set_device(int index) {
    check(index);
    state().used[index] = true;
    tls_device = index;
}

bool was_used(int index) { return state().used[index]; }

c10::StreamId current_stream(int device) { return tls_streams[device]; }

c10::StreamId exchange_stream(int device, c10::StreamId stream) { return std::exchange(tls_streams[device], stream); }

c10::StreamId new_stream(int device) {
    check(device);
    Guard guard(state().mutex);
    queue_of(device, 0);  // 0 is the default stream
    state().queues[device].push_back(std::make_unique<Queue>());
    return static_cast<c10::StreamId>(state().queues[device].size()) - 1;
}

namespace {

c10::StreamId scheduled(c10::StreamId stream) { return state().schedule == Schedule::kOrdered ? 0 : stream; }

bool is_lost(int device) { return state().operations_left[device] == 0; }

void run_front(int device, Queue& queue) {
    const uint64_t done = queue.done;
    if (const auto after = queue.jobs.front().after; after.has_value() && !is_lost(device)) {
        run_to(*after);  // it stays in the queue meanwhile: nothing behind it may run
        if (queue.done > done) return;
    }
    const Job job = std::move(queue.jobs.front());
    queue.jobs.pop_front();
    ++queue.done;  // before it runs: one that fails is over as well
    if (!job.after.has_value() && !is_lost(device)) job.run();
}

bool can_run(const Queue& queue) {
    return !queue.jobs.empty() && (!queue.jobs.front().after.has_value() || is_reached(*queue.jobs.front().after));
}

// Let every side stream run as far as it can without waiting.
void advance() {
    if (state().schedule != Schedule::kEarly || state().advancing) return;
    state().advancing = true;
    const auto done = c10::make_scope_exit([] { state().advancing = false; });
    for (bool moved = true; moved;) {
        moved = false;
        for (int device = 0; device < kMaxDevices; ++device) {
            auto& queues = state().queues[device];
            for (size_t stream = 1; stream < queues.size(); ++stream) {
                for (; can_run(*queues[stream]); moved = true) run_front(device, *queues[stream]);
            }
        }
    }
}

Place give(int device, c10::StreamId stream, Job job) {
    Guard guard(state().mutex);
    stream = scheduled(stream);
    Queue& queue = queue_of(device, stream);
    queue.jobs.push_back(std::move(job));
    ++queue.given;
    const Place place{device, stream, queue.given};
    if (state().schedule == Schedule::kNone) run_to(place);
    if (queue.jobs.size() > kMaxWaiting) run_front(device, queue);
    advance();
    return place;
}

}  // namespace

Place enqueue(int device, c10::StreamId stream, std::function<void()> job) {
    return give(device, stream, {std::move(job), std::nullopt});
}

void enqueue_wait(int device, c10::StreamId stream, const Place& until) {
    if (!is_reached(until)) give(device, stream, {nullptr, until});
}

Place end_of(int device, c10::StreamId stream) {
    Guard guard(state().mutex);
    stream = scheduled(stream);
    return {device, stream, queue_of(device, stream).given};
}

bool is_reached(const Place& place) {
    Guard guard(state().mutex);
    return queue_of(place.device, place.stream).done >= place.jobs;
}

void run_to(const Place& place) {
    Guard guard(state().mutex);
    Queue& queue = queue_of(place.device, place.stream);
    while (queue.done < place.jobs && !queue.jobs.empty()) run_front(place.device, queue);
    advance();
}

void finish_stream(int device, c10::StreamId stream) { run_to(end_of(device, stream)); }

void finish_device(int device) {
    Guard guard(state().mutex);
    for (size_t stream = 0; stream < state().queues[device].size(); ++stream) finish_stream(device, stream);
}

int64_t waiting_jobs(int device) {
    Guard guard(state().mutex);
    int64_t waiting = 0;
    for (auto& queue : state().queues[device]) waiting += queue->jobs.size();
    return waiting;
}

namespace {
std::atomic<int64_t> num_host_waits{0};
}  // namespace

void count_host_wait() { ++num_host_waits; }

int64_t host_waits() { return num_host_waits; }

void set_schedule(Schedule schedule) {
    Guard guard(state().mutex);
    for (int device = 0; device < kMaxDevices; ++device) finish_device(device);
    state().schedule = schedule;
}

void check_not_lost(int device) {
    Guard guard(state().mutex);
    if (!is_lost(device)) return;
    const std::string told = c10::str(device_at(device), " is lost: nothing runs there any more, its memory is gone");
    throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 1, told);
}

void count_operation(int device) {
    Guard guard(state().mutex);
    int64_t& left = state().operations_left[device];
    if (left > 0) --left;
    check_not_lost(device);
}

void lose_device(int device, int64_t operations) {
    check(device);
    Guard guard(state().mutex);
    state().operations_left[device] = operations < 0 ? -1 : operations + 1;  // the one after them fails
}

namespace {

using Clock = std::chrono::steady_clock;

// One recording of an event: shared by the event and by the streams that wait for it.
struct Recording {
    Place place;
    bool measures;
    Clock::time_point reached;
};

using Event = std::shared_ptr<Recording>;

struct SimGuard final : c10::impl::DeviceGuardImplInterface {
    static int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }
    static c10::Stream stream_at(int device, c10::StreamId id) {
        return c10::Stream(c10::Stream::UNSAFE, device_at(device), id);
    }

    c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
    c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }
    c10::Device getDevice() const override { return device_at(current_device()); }
    void setDevice(c10::Device device) const override { set_device(index_of(device)); }
    void uncheckedSetDevice(c10::Device device) const noexcept override { tls_device = index_of(device); }
    c10::Device exchangeDevice(c10::Device device) const override {
        const int before = current_device();
        set_device(index_of(device));
        return device_at(before);
    }
    c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

    c10::Stream getStream(c10::Device device) const override {
        const int index = index_of(device);
        return stream_at(index, current_stream(index));
    }
    c10::Stream getDefaultStream(c10::Device device) const override { return stream_at(index_of(device), 0); }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
    c10::Stream getNewStream(c10::Device device, int) const override {
        const int index = index_of(device);
        return stream_at(index, new_stream(index));
    }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        const int index = stream.device_index();
        return stream_at(index, exchange_stream(index, stream.id()));
    }
    bool queryStream(const c10::Stream& stream) const override { return progressed(end(stream)); }
    void synchronizeStream(const c10::Stream& stream) const override {
        check_not_lost(stream.device_index());
        count_host_wait();
        finish_stream(stream.device_index(), stream.id());
    }
    void synchronizeDevice(const c10::DeviceIndex index) const override {
        check_not_lost(index);
        count_host_wait();
        finish_device(index);
    }

    void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
                const c10::EventFlag flag) const override {
        auto recording = std::make_shared<Recording>();
        recording->measures = flag == c10::EventFlag::BACKEND_DEFAULT;
        recording->place = end(stream);
        if (is_reached(recording->place)) {
            recording->reached = Clock::now();
        } else {
            auto stamp = [recording] { recording->reached = Clock::now(); };
            recording->place = enqueue(stream.device_index(), stream.id(), stamp);
        }
        if (*event == nullptr) *event = new Event();
        *static_cast<Event*>(*event) = recording;
    }
    void block(void* event, const c10::Stream& stream) const override {
        if (event == nullptr) return;  // never recorded
        enqueue_wait(stream.device_index(), stream.id(), (*static_cast<Event*>(event))->place);
    }
    bool queryEvent(void* event) const override {
        return event == nullptr || progressed((*static_cast<Event*>(event))->place);
    }
    void synchronizeEvent(void* event) const override {
        if (event == nullptr) return;
        const Place place = (*static_cast<Event*>(event))->place;
        check_not_lost(place.device);
        count_host_wait();
        run_to(place);
    }
    void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
        delete static_cast<Event*>(event);
    }
    double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
        TORCH_CHECK(begin != nullptr && end != nullptr, "elapsed_time: both events must have been recorded");
        Event first = *static_cast<Event*>(begin);
        Event last = *static_cast<Event*>(end);
        TORCH_CHECK(first->measures && last->measures, "elapsed_time: both events need enable_timing=True");
        TORCH_CHECK(is_reached(first->place) && is_reached(last->place),
                    "elapsed_time: an event has not been reached yet; synchronize it first");
        return std::chrono::duration<double, std::milli>(last->reached - first->reached).count();
    }
    void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
        record_use(data.get(), stream.device_index(), stream.id());
    }

  private:
    static Place end(const c10::Stream& stream) { return end_of(stream.device_index(), stream.id()); }
    // False while there was something to do, so that a loop that asks until it is done comes to an end.
    static bool progressed(const Place& place) {
        const bool reached = is_reached(place);
        if (!reached) run_to(place);
        return reached;
    }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard)

}  // namespace

}  // namespace sim
