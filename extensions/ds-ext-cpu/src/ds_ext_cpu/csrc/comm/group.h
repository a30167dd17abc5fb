// One rank's view of a group: who the peers are, whether they live, what they do, and how to read their memory.
#pragma once

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/kinds.h"
#include "comm/segment.h"

namespace ds_cpu::comm {

// A collective or message that cannot be finished.
struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

enum class Wish : uint32_t { kAny, kRead, kShm };

// A deadline, and what this rank does until then.
struct Wait {
    const Description* description;  // null: it connects
    int64_t limit_ns;                // how long
    int64_t deadline;                // of now_ns()
    std::string text;                // says more than a description
    Wait(const Description* description, int64_t limit_ns)
        : description(description), limit_ns(limit_ns), deadline(now_ns() + limit_ns) {}
    std::string what() const;
};

class Group {
  public:
    // `segment` is a mapping of `Layout(size).num_bytes`, which the group takes over; `ranks` are those of the job.
    Group(void* segment, int rank, int size, std::vector<int> ranks);
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;
    ~Group();

    // Meets the peers, and agrees with them on whether they read each other's memory.
    void connect(Wish wish, int64_t timeout_ns);

    const int rank, size;
    const Layout layout;
    bool reads = false;  // the memory of peers, where that is faster than the segment

    // ----- steps -----------------------------------------------------------------------------------------------------

    // What this rank gave may be used by peers.
    void post();
    // Returns when that peer has come to this rank's last step.
    void wait_for(int peer, const Wait& wait);
    // Both, for all peers.
    void sync(const Wait& wait);

    Cell& cell(int of) const { return cells_[of]; }
    Offer* offers(int from, int to) const {
        return offers_ + (static_cast<size_t>(from) * size + to) * offers_per_pair(size);
    }
    char* window(int of, uint64_t number) const {
        return base_ + layout.windows + (static_cast<size_t>(of) * kWindows + number % kWindows) * layout.window_bytes;
    }
    char* chunk(int of, uint64_t number) const {
        return base_ + layout.pools + (static_cast<size_t>(of) * kChunks + number % kChunks) * layout.chunk_bytes;
    }

    // Copies from the memory of a peer.
    void read(int peer, uint64_t address, void* to, size_t num_bytes, const Wait& wait);

    // ----- failures --------------------------------------------------------------------------------------------------

    // Raises, here and in all ranks that wait or come to wait: the first failure of a group stays.
    [[noreturn]] void fail(const std::string& text);
    // As `fail`, and raises nothing.
    void abort(const std::string& text) noexcept;
    // This rank leaves: what it waits for ends, and peers that wait for it raise. They know of it before that ends, so
    // that who reads the memory of this rank and then finds it there has read what it gave.
    void close() noexcept;
    bool has_failed() const { return head_->fault.load(std::memory_order_acquire) != 0; }
    [[noreturn]] void raise_failure(const std::string& what) const;
    bool is_open() const { return !has_failed() && !has_left(rank); }
    // Raises after a failure, and after `close`.
    void check_open(const Wait& wait) const {
        if (has_failed()) raise_failure(wait.what());
        if (has_left(rank)) throw Failure(called(rank) + " left the group before " + wait.what() + " was over");
    }
    // False: that peer cannot come any more. It may have come before: ask first, then look for what it left.
    bool lives(int peer) const;
    // Raises where it does not live.
    void check_alive(int peer, const std::string& what);
    // "rank 3", by its number in the job.
    std::string called(int peer) const { return "rank " + std::to_string(ranks_[peer]); }
    static std::string seconds(int64_t ns);

    // Asked now and then while the calling thread waits in `sync`; True ends the wait.
    static thread_local std::function<bool()>* interrupted;

  private:
    bool look(int peer, uint32_t target) const {
        return static_cast<int32_t>(cells_[peer].tick.load(std::memory_order_acquire) - target) >= 0;
    }
    bool has_left(int peer) const { return cells_[peer].has_left.load() != 0; }
    [[noreturn]] void fail_late(int peer, const Wait& wait);

    char* const base_;
    Head* const head_;
    Cell* const cells_;
    Offer* const offers_;
    const std::vector<int> ranks_;
    uint32_t tick_ = 0;
    void wake_all() noexcept;
    int num_looks_;
    uint64_t proof_;
};

// Of a process of this machine: when it started, in ticks since boot; 0: there is none, or it has ended.
uint64_t start_time_of(int64_t process);

std::string described(const Description& description);

}  // namespace ds_cpu::comm
