// What the ranks of a group share: one segment of memory that all of them map, and how they wait for each other in it.
//
//     cells            one per rank: where it is, what it does, who it is
//     offers           messages between two ranks, one ring per pair
//     message pools    two chunks per rank, which messages pass through where memory is not read
//     windows          three per rank, which collectives pass through
//
// A word that another process waits for is a futex: who changes it wakes those who sleep. Nobody spins for long, so
// that ranks can share a core.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <ctime>

namespace ds_cpu::comm {

constexpr int kMaxRanks = 64;
constexpr int kWindows = 3;
constexpr int kChunks = 2;
constexpr size_t kLine = 64;
constexpr size_t kPage = 4096;
constexpr size_t kTextBytes = 1024;

// What a rank does in a collective. Its peers compare all before `spans`, and find there what they read.
struct Description {
    uint32_t kind, op, dtype, root;
    uint64_t numel;  // where that must be the same on all ranks; else 0
    uint64_t number;
    uint64_t windows;  // that the input takes
    // of the part for each rank, or of the whole input in the first one; and what this rank wants from each
    struct Span {
        uint64_t address, num_bytes, wanted;
    } spans[kMaxRanks];
};
constexpr uint64_t kNothingWanted = UINT64_MAX;

// Of one rank, which writes it. `tick` counts its steps: after step n peers may use what it gave in step n.
struct Cell {
    alignas(kLine) std::atomic<uint32_t> tick;
    std::atomic<uint32_t> tick_sleepers;
    alignas(kLine) std::atomic<uint32_t> bell;  // rung when a message for or from this rank changes
    std::atomic<uint32_t> bell_sleepers;
    alignas(kLine) std::atomic<uint32_t> has_left;
    uint32_t wish, can_read, is_strange;
    int64_t process;
    uint64_t start_time;
    uint64_t proof_address, proof;
    alignas(kLine) Description descriptions[2];
};

enum class OfferState : uint32_t { kFree, kOffered, kGranted, kDone, kWithdrawn };

// A message from one rank to another, written by the sender, who frees it; the receiver grants and ends it. What is
// offered either gets: the receiver grants or ends it, or the sender withdraws it, for good.
struct alignas(kLine) Offer {
    std::atomic<uint32_t> state;
    uint32_t tag;
    uint64_t number, num_bytes, address;
    std::atomic<uint32_t> filled, taken;  // chunks
};

struct Head {
    std::atomic<uint64_t> magic;
    std::atomic<uint32_t> fault;  // 0, 1 while the text is written, 2
    uint32_t fault_rank;
    char text[kTextBytes];
};

inline int offers_per_pair(int size) { return size <= 16 ? 64 : 16; }

inline size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

inline size_t clamped(size_t value, size_t least, size_t most) {
    return value < least ? least : value > most ? most : value;
}

// Where everything is, for a number of ranks.
struct Layout {
    explicit Layout(int size)
        : window_bytes(clamped((size_t{4} << 20) / size, size_t{32} << 10, size_t{256} << 10) / kPage * kPage),
          chunk_bytes(clamped((size_t{1} << 20) / size, size_t{16} << 10, size_t{128} << 10) / kPage * kPage),
          cells(rounded(sizeof(Head), kPage)),
          offers(cells + rounded(sizeof(Cell) * size, kPage)),
          pools(offers + rounded(sizeof(Offer) * offers_per_pair(size) * size * size, kPage)),
          windows(pools + chunk_bytes * kChunks * size),
          num_bytes(windows + window_bytes * kWindows * size) {}
    size_t window_bytes, chunk_bytes, cells, offers, pools, windows, num_bytes;
};

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

inline int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

// Sleep while `word` is `seen`, for at most `ns`. False: that time has passed.
inline bool sleep_on(std::atomic<uint32_t>& word, std::atomic<uint32_t>& sleepers, uint32_t seen, int64_t ns) {
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free);
    const timespec limit{ns / 1'000'000'000, ns % 1'000'000'000};
    sleepers.fetch_add(1);
    const long result = word.load() == seen
                            ? syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &limit, 0, 0)
                            : 0;
    const bool is_late = result == -1 && errno == ETIMEDOUT;
    sleepers.fetch_sub(1);
    return !is_late;
}

inline void wake_sleepers(std::atomic<uint32_t>& word, const std::atomic<uint32_t>& sleepers) {
    if (sleepers.load() != 0) syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, 0, 0, 0);
}

}  // namespace ds_cpu::comm
