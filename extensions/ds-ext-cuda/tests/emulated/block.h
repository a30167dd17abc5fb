// Runs the threads of a block as fibers, with barriers and exchanges within warps.
//
// A warp runs as far as it can before another one does, warps and lanes in an order that is shuffled, the same way in
// every run: what relies on an order without a barrier goes wrong. A wait that cannot end is an error.
#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <source_location>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fiber.h"
#include "vector_types.h"

inline uint3 threadIdx;
inline uint3 blockIdx;
inline dim3 blockDim;
inline dim3 gridDim;
constexpr int warpSize = 32;

namespace ds_emulated {

constexpr int kLanes = 32;
constexpr size_t kCanaryBytes = 64;
constexpr unsigned char kCanary = 0xA5;

inline std::string at(uint3 index) {
    return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
}

inline std::string at(const std::source_location& place) {
    return std::string(place.file_name()) + ":" + std::to_string(place.line());
}

enum class State { kReady, kAtBarrier, kInWarp, kEnded };

struct Thread {
    Fiber fiber;
    uint3 index;
    State state;
    std::source_location place;  // where it waits
    unsigned mask;               // of the lanes that it waits for
    uint64_t value;              // what it gives the others
    uint64_t values[kLanes];     // what they gave
};

class Block {
  public:
    // Runs `body` once per thread. Raises what a thread raised, or why threads wait for ever.
    void run(dim3 size, size_t shared_bytes, uint64_t number, const std::function<void()>& body) {
        prepare(size, shared_bytes, number, body);
        while (num_live_ > 0) {
            bool moved = false;
            for (int warp : shuffle(num_warps_, warp_order_)) {
                while (run_warp(warp)) moved = true;
            }
            if (!moved) release_barrier();
        }
        check_canaries();
    }

    Thread& running() { return *running_; }
    unsigned char* shared() { return shared_; }
    int num_threads() const { return num_threads_; }
    Thread& thread(int number) { return *threads_[number]; }

    // Called on a thread: waits for the whole block. `value` is seen by all of them through `thread(i).value`.
    void barrier(uint64_t value, const std::source_location& place) {
        Thread& self = running();
        self.value = value;
        wait(self, State::kAtBarrier, place);
    }

    // Called on a thread: gives `value` to the lanes of `mask`, waits for theirs. [lane] of the result is what it gave.
    const uint64_t* exchange(unsigned mask, uint64_t value, const std::source_location& place) {
        Thread& self = running();
        const int lane = number_of(self) % kLanes;
        if (!(mask >> lane & 1))
            throw std::runtime_error(at(place) + ": lane " + std::to_string(lane) +
                                     " calls with a mask that leaves it out");
        self.mask = mask;
        self.value = value;
        wait(self, State::kInWarp, place);
        return self.values;
    }

    int lane() { return number_of(running()) % kLanes; }

  private:
    void prepare(dim3 size, size_t shared_bytes, uint64_t number, const std::function<void()>& body) {
        body_ = &body;
        num_threads_ = num_live_ = static_cast<int>(size.x * size.y * size.z);
        num_warps_ = (num_threads_ + kLanes - 1) / kLanes;
        random_ = number * 0x9E3779B97F4A7C15u + 0x2545F4914F6CDD1Du;
        while (static_cast<int>(threads_.size()) < num_threads_) threads_.push_back(std::make_unique<Thread>());
        for (int i = 0; i < num_threads_; ++i) {
            Thread& thread = *threads_[i];
            thread.index = {i % size.x, i / size.x % size.y, i / (size.x * size.y)};
            thread.state = State::kReady;
            thread.fiber.begin(&Block::entry);
        }
        failure_ = nullptr;
        self() = this;
        prepare_shared(shared_bytes);
    }

    // Filled with NaN, because a block finds anything there; with canaries around, because nothing guards them.
    void prepare_shared(size_t bytes) {
        bytes_ = bytes;
        memory_.reset();
        memory_.reset(new (std::align_val_t(128)) unsigned char[bytes + 2 * kCanaryBytes]);
        std::memset(memory_.get(), kCanary, bytes + 2 * kCanaryBytes);
        shared_ = memory_.get() + kCanaryBytes;
        std::memset(shared_, 0xFF, bytes);
    }

    void check_canaries() {
        for (size_t i = 0; i < kCanaryBytes; ++i) {
            if (memory_[i] != kCanary || shared_[bytes_ + i] != kCanary) {
                throw std::runtime_error("wrote outside its " + std::to_string(bytes_) +
                                         " bytes of dynamic shared memory");
            }
        }
    }

    static Block*& self() {
        static Block* block;
        return block;
    }

    static void entry() {
        Block& block = *self();
        Thread& thread = block.running();
        thread.fiber.entered();
        try {
            (*block.body_)();
        } catch (...) {
            block.failure_ = std::current_exception();
        }
        thread.state = State::kEnded;
        thread.fiber.leave();
    }

    int number_of(const Thread& thread) const {
        return static_cast<int>(thread.index.x + blockDim.x * (thread.index.y + blockDim.y * thread.index.z));
    }

    void wait(Thread& thread, State state, const std::source_location& place) {
        thread.state = state;
        thread.place = place;
        thread.fiber.yield();
    }

    void go_on(Thread& thread) {
        running_ = &thread;
        threadIdx = thread.index;
        thread.fiber.go_on();
        if (thread.state == State::kEnded) --num_live_;
        if (failure_ != nullptr) rethrow(thread);
    }

    [[noreturn]] void rethrow(const Thread& thread) {
        try {
            std::rethrow_exception(failure_);
        } catch (const std::exception& error) {
            throw std::runtime_error("thread " + at(thread.index) + ": " + error.what());
        }
    }

    // Runs the lanes that can; lets go those that were waiting for each other. False: nothing moved.
    bool run_warp(int warp) {
        const int first = warp * kLanes, count = std::min(kLanes, num_threads_ - first);
        bool moved = false;
        for (int lane : shuffle(count, lane_order_)) {
            Thread& thread = *threads_[first + lane];
            if (thread.state == State::kReady) {
                go_on(thread);
                moved = true;
            }
        }
        for (int lane = 0; lane < count; ++lane) {
            if (threads_[first + lane]->state == State::kInWarp) moved |= finish_exchange(first, count, lane);
        }
        return moved;
    }

    // Whether all lanes of this one's mask wait at the same place with the same mask; they go on then.
    bool finish_exchange(int first, int count, int lane) {
        const Thread& one = *threads_[first + lane];
        const unsigned mask = one.mask;
        for (int other = 0; other < kLanes; ++other) {
            if (!(mask >> other & 1)) continue;
            if (other >= count) return false;
            const Thread& thread = *threads_[first + other];
            if (thread.state != State::kInWarp || thread.mask != mask || !same_place(thread, one)) return false;
        }
        uint64_t values[kLanes] = {};
        for (int other = 0; other < count; ++other) {
            if (mask >> other & 1) values[other] = threads_[first + other]->value;
        }
        for (int other = 0; other < count; ++other) {
            if (!(mask >> other & 1)) continue;
            std::memcpy(threads_[first + other]->values, values, sizeof values);
            threads_[first + other]->state = State::kReady;
        }
        return true;
    }

    static bool same_place(const Thread& a, const Thread& b) {
        return a.place.line() == b.place.line() && std::strcmp(a.place.file_name(), b.place.file_name()) == 0;
    }

    // Nothing can run: all threads are at one barrier, or something is wrong.
    void release_barrier() {
        const Thread* waiting = nullptr;
        for (int i = 0; i < num_threads_; ++i) {
            const Thread& thread = *threads_[i];
            if (thread.state == State::kInWarp) refuse_exchange(thread);
            if (thread.state == State::kAtBarrier) waiting = &thread;
        }
        for (int i = 0; i < num_threads_; ++i) {
            const Thread& thread = *threads_[i];
            if (thread.state == State::kEnded) {
                throw std::runtime_error("thread " + at(waiting->index) + " waits at the barrier of " +
                                         at(waiting->place) + ", which thread " + at(thread.index) +
                                         " never reaches: it has ended");
            }
            if (!same_place(thread, *waiting)) {
                throw std::runtime_error("thread " + at(waiting->index) + " waits at the barrier of " +
                                         at(waiting->place) + ", thread " + at(thread.index) + " at that of " +
                                         at(thread.place));
            }
        }
        for (int i = 0; i < num_threads_; ++i) threads_[i]->state = State::kReady;
    }

    [[noreturn]] void refuse_exchange(const Thread& thread) {
        const int number = number_of(thread), first = number - number % kLanes;
        std::string why = "waits for lanes of its mask";
        for (int other = 0; other < kLanes; ++other) {
            if (!(thread.mask >> other & 1)) continue;
            const std::string name = "lane " + std::to_string(other) + " of its mask";
            if (first + other >= num_threads_) {
                why = "waits for " + name + ", which the block does not have";
            } else if (threads_[first + other]->state == State::kEnded) {
                why = "waits for " + name + ", which has ended";
            } else if (!same_place(*threads_[first + other], thread) || threads_[first + other]->mask != thread.mask) {
                why = "waits for " + name + ", which waits at " + at(threads_[first + other]->place);
            }
        }
        throw std::runtime_error("thread " + at(thread.index) + " at " + at(thread.place) + " " + why);
    }

    // 0 ... count - 1 in an order that changes from call to call, and is the same in every run.
    const std::vector<int>& shuffle(int count, std::vector<int>& order) {
        order.resize(count);
        for (int i = 0; i < count; ++i) order[i] = i;
        for (int i = count - 1; i > 0; --i) {
            random_ ^= random_ << 13;
            random_ ^= random_ >> 7;
            random_ ^= random_ << 17;
            std::swap(order[i], order[random_ % (i + 1)]);
        }
        return order;
    }

    struct FreeAligned {
        void operator()(unsigned char* memory) const { operator delete[](memory, std::align_val_t(128)); }
    };

    const std::function<void()>* body_ = nullptr;
    std::vector<std::unique_ptr<Thread>> threads_;
    int num_threads_ = 0, num_warps_ = 0, num_live_ = 0;
    Thread* running_ = nullptr;
    std::exception_ptr failure_;
    std::unique_ptr<unsigned char[], FreeAligned> memory_;
    unsigned char* shared_ = nullptr;
    size_t bytes_ = 0;
    uint64_t random_ = 0;
    std::vector<int> warp_order_, lane_order_;
};

// The one block that runs.
inline Block& block() {
    static Block one;
    return one;
}

}  // namespace ds_emulated
