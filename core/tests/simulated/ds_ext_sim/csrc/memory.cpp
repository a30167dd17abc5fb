#include "memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "queues.h"

namespace sim {

namespace {

constexpr size_t kWindow = size_t{1} << 35;  // addresses of one device; memory is taken by touch
constexpr size_t kGrain = 512;
constexpr size_t kPage = 4096;
constexpr int64_t kDefaultTotal = int64_t{4} << 30;

struct Windows {
    char* device;  // nobody may touch it
    char* host;    // the bytes

    Windows() : device(reserve(PROT_NONE)), host(reserve(PROT_READ | PROT_WRITE)) {}

    static char* reserve(int protection) {
        void* found =
            mmap(nullptr, kWindow * kMaxDevices, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        TORCH_CHECK(found != MAP_FAILED, "the simulated device gets no addresses: ", std::strerror(errno));
        return static_cast<char*>(found);
    }
};

Windows& windows() {
    static Windows* leaked = new Windows();
    return *leaked;
}

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatType;

struct Block {
    size_t size;  // a multiple of kGrain
    size_t asked;
    c10::StreamId stream;
    std::vector<c10::StreamId> users;  // other streams
};

struct Waiting {  // freed, and still used by other streams
    size_t start;
    Block block;
    std::vector<Place> until;
};

// Blocks of one device. What is freed is kept for its stream, as the allocators of real devices do.
struct Pool {
    int device = 0;
    int64_t total = kDefaultTotal;
    std::unordered_map<size_t, Block> live;                                // by offset
    std::map<std::pair<c10::StreamId, size_t>, std::vector<size_t>> kept;  // (stream, size) -> offsets
    std::map<size_t, size_t> holes{{kGrain, kWindow - kGrain}};            // offset -> size, never taken or given back
    std::vector<Waiting> waiting;
    c10::CachingDeviceAllocator::DeviceStats stats;

    Stat& allocated() { return stats.allocated_bytes[static_cast<size_t>(StatType::AGGREGATE)]; }
    Stat& reserved() { return stats.reserved_bytes[static_cast<size_t>(StatType::AGGREGATE)]; }
    Stat& active() { return stats.active_bytes[static_cast<size_t>(StatType::AGGREGATE)]; }
    Stat& requested() { return stats.requested_bytes[static_cast<size_t>(StatType::AGGREGATE)]; }
    Stat& blocks() { return stats.allocation[static_cast<size_t>(StatType::AGGREGATE)]; }

    char* device_at(size_t start) const { return windows().device + device * kWindow + start; }
    char* host_at(size_t start) const { return windows().host + device * kWindow + start; }

    size_t allocate(size_t asked, c10::StreamId stream) {
        const size_t size = (asked + kGrain - 1) / kGrain * kGrain;
        collect();
        size_t start = 0;
        const auto found = kept.find({stream, size});
        const bool reused = found != kept.end();
        if (reused) {
            start = found->second.back();
            found->second.pop_back();
            if (found->second.empty()) kept.erase(found);
        } else {
            start = take_hole(size);
            reserved().increase(size);
        }
        live.emplace(start, Block{size, asked, stream, {}});
        allocated().increase(size);
        active().increase(size);
        requested().increase(asked);
        blocks().increase(1);
        poison(start, size, stream, reused);
        return start;
    }

    void free(size_t start) {
        const auto found = live.find(start);
        if (found == live.end()) return;
        Block block = std::move(found->second);
        live.erase(found);
        allocated().decrease(block.size);
        active().decrease(block.size);
        requested().decrease(block.asked);
        blocks().decrease(1);
        std::vector<Place> until;
        for (c10::StreamId user : block.users) until.push_back(end_of(device, user));
        waiting.push_back({start, std::move(block), std::move(until)});
        collect();
    }

    // Give back to the device what is kept.
    void give_back() {
        collect();
        for (auto& [key, starts] : kept) {
            for (size_t start : starts) {
                release_pages(start, start + key.second);
                reserved().decrease(key.second);
                put_hole(start, key.second);
            }
        }
        kept.clear();
    }

  private:
    // The host's pages that lie in here as a whole: those at the ends are also other blocks'.
    void release_pages(size_t start, size_t stop) {
        start = (start + kPage - 1) / kPage * kPage;
        stop = stop / kPage * kPage;
        if (start < stop) madvise(host_at(start), stop - start, MADV_DONTNEED);
    }

    // Keep freed blocks whose users are done.
    void collect() {
        for (size_t index = waiting.size(); index-- > 0;) {
            Waiting& freed = waiting[index];
            bool used = false;
            for (const Place& place : freed.until) used |= !is_reached(place);
            if (used) continue;
            kept[{freed.block.stream, freed.block.size}].push_back(freed.start);
            waiting.erase(waiting.begin() + static_cast<int64_t>(index));
        }
    }

    size_t take_hole(size_t size) {
        if (reserved().current + static_cast<int64_t>(size) > total) {
            ++stats.num_alloc_retries;
            finish_device(device);
            give_back();
        }
        if (reserved().current + static_cast<int64_t>(size) > total) {
            ++stats.num_ooms;
            TORCH_CHECK_WITH(OutOfMemoryError, false, sim::device_at(device), " is out of memory: ", size,
                             " bytes were asked for, ", total - reserved().current, " of ", total, " are free");
        }
        for (auto hole = holes.begin(); hole != holes.end(); ++hole) {
            const auto [start, length] = *hole;
            if (length < size) continue;
            holes.erase(hole);
            if (length > size) holes.emplace(start + size, length - size);
            return start;
        }
        TORCH_CHECK_WITH(OutOfMemoryError, false, sim::device_at(device), " has no ", size, " addresses in a row");
    }

    void put_hole(size_t start, size_t size) {
        auto next = holes.lower_bound(start);
        if (next != holes.end() && start + size == next->first) {
            size += next->second;
            next = holes.erase(next);
        }
        if (next != holes.begin()) {
            auto before = std::prev(next);
            if (before->first + before->second == start) {
                before->second += size;
                return;
            }
        }
        holes.emplace(start, size);
    }

    // All bits set: NaN in every floating point type. What reads memory that nobody wrote fails.
    void poison(size_t start, size_t size, c10::StreamId stream, bool reused) {
        char* bytes = host_at(start);
        if (reused) {  // in its turn: jobs of this stream may still use the block as it was
            enqueue(device, stream, [bytes, size] { std::memset(bytes, 0xFF, size); });
        } else {
            std::memset(bytes, 0xFF, size);
        }
    }
};

void reset_peak(c10::CachingAllocator::StatArray& stats) {
    for (Stat& stat : stats) stat.reset_peak();
}

void reset_accumulated(c10::CachingAllocator::StatArray& stats) {
    for (Stat& stat : stats) stat.reset_accumulated();
}

struct SimAllocator final : c10::DeviceAllocator {
    std::recursive_mutex mutex;
    std::array<Pool, kMaxDevices> pools;

    SimAllocator() {
        for (int device = 0; device < kMaxDevices; ++device) pools[device].device = device;
    }

    c10::DataPtr allocate(size_t num_bytes) override {
        const int device = current_device();
        const c10::Device where = device_at(device);
        if (num_bytes == 0) return {nullptr, nullptr, &nothing, where};
        std::lock_guard<std::recursive_mutex> guard(mutex);
        set_device(device);  // it is used from now on
        Pool& pool = pools[device];
        char* address = pool.device_at(pool.allocate(num_bytes, current_stream(device)));
        return {address, address, &release, where};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* to, const void* from, size_t num_bytes) const override {
        finish_current_stream(device_of(to));
        std::memcpy(host_address(to), host_address(from), num_bytes);
    }
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override {
        std::lock_guard<std::recursive_mutex> guard(mutex);
        for (Pool& pool : pools) {
            if (!was_used(pool.device)) continue;
            count_host_wait();
            finish_device(pool.device);
            pool.give_back();
        }
    }
    void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
        record_use(data.get(), stream.device_index(), stream.id());
    }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
        return pools[index].stats;
    }
    void resetPeakStats(c10::DeviceIndex index) override {
        auto& stats = pools[index].stats;
        for (auto* each : {&stats.allocation, &stats.active, &stats.allocated_bytes, &stats.reserved_bytes,
                           &stats.active_bytes, &stats.requested_bytes}) {
            reset_peak(*each);
        }
    }
    void resetAccumulatedStats(c10::DeviceIndex index) override {
        auto& stats = pools[index].stats;
        for (auto* each : {&stats.allocation, &stats.active, &stats.allocated_bytes, &stats.reserved_bytes,
                           &stats.active_bytes, &stats.requested_bytes}) {
            reset_accumulated(*each);
        }
        stats.num_alloc_retries = stats.num_ooms = 0;
    }
    std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
        Pool& pool = pools[index];
        return {static_cast<size_t>(pool.total - pool.reserved().current), static_cast<size_t>(pool.total)};
    }

    static void release(void* address);
    static void nothing(void*) {}
};

SimAllocator& allocator() {
    static SimAllocator* leaked = new SimAllocator();
    return *leaked;
}

size_t offset_of(const void* address) {
    return static_cast<size_t>(static_cast<const char*>(address) - windows().device) % kWindow;
}

void SimAllocator::release(void* address) {
    SimAllocator& self = allocator();
    std::lock_guard<std::recursive_mutex> guard(self.mutex);
    self.pools[device_of(address)].free(offset_of(address));
}

struct PinnedAllocator final : c10::Allocator {
    std::mutex mutex;
    std::map<const char*, size_t> live;

    c10::DataPtr allocate(size_t num_bytes) override {
        if (num_bytes == 0) return {nullptr, nullptr, &SimAllocator::nothing, c10::Device(c10::DeviceType::CPU)};
        char* address = static_cast<char*>(std::aligned_alloc(4096, (num_bytes + 4095) / 4096 * 4096));
        TORCH_CHECK(address != nullptr, "no page-locked memory of ", num_bytes, " bytes");
        std::lock_guard<std::mutex> guard(mutex);
        live.emplace(address, num_bytes);
        return {address, address, &release, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &release; }
    void copy_data(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
    static void release(void* address);
};

PinnedAllocator& pinned() {
    static PinnedAllocator* leaked = new PinnedAllocator();
    return *leaked;
}

void PinnedAllocator::release(void* address) {
    {
        std::lock_guard<std::mutex> guard(pinned().mutex);
        pinned().live.erase(static_cast<char*>(address));
    }
    std::free(address);
}

// At once, when the library is loaded.
const bool allocator_registered = [] {
    c10::SetAllocator(c10::DeviceType::PrivateUse1, &allocator());
    return true;
}();

}  // namespace

void* host_address(const void* address) {
    if (address == nullptr) return nullptr;
    return windows().host + (static_cast<const char*>(address) - windows().device);
}

int device_of(const void* address) {
    const char* start = windows().device;
    const char* asked = static_cast<const char*>(address);
    if (asked < start || asked >= start + kWindow * kMaxDevices) return -1;
    return static_cast<int>((asked - start) / kWindow);
}

void record_use(const void* address, int device, c10::StreamId stream) {
    if (device_of(address) != device) return;  // empty, or the memory of another device
    SimAllocator& self = allocator();
    std::lock_guard<std::recursive_mutex> guard(self.mutex);
    const auto found = self.pools[device].live.find(offset_of(address));
    if (found != self.pools[device].live.end() && found->second.stream != stream) {
        found->second.users.push_back(stream);
    }
}

void set_total_memory(int device, int64_t bytes) { allocator().pools[device].total = bytes; }

c10::Allocator* pinned_allocator() { return &pinned(); }

bool is_pinned(const void* address) {
    std::lock_guard<std::mutex> guard(pinned().mutex);
    const char* asked = static_cast<const char*>(address);
    auto next = pinned().live.upper_bound(asked);
    if (next == pinned().live.begin()) return false;
    --next;
    return asked < next->first + next->second;
}

}  // namespace sim
