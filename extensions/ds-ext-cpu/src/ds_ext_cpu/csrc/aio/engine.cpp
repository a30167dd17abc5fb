#include "aio/engine.h"

#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <system_error>

namespace ds_cpu::aio {

namespace {

constexpr int64_t kBounceAlign = 4096;  // of our own memory; files that want more are refused by the caller

int64_t call(const Piece& piece) {
    const ssize_t count = piece.operation->request.write
                              ? pwrite(piece.fd(), piece.memory(), size_t(piece.length), off_t(piece.offset))
                              : pread(piece.fd(), piece.memory(), size_t(piece.length), off_t(piece.offset));
    return count < 0 ? -errno : count;
}

void close_files(const Request& request) {
    if (request.direct_fd >= 0) close(request.direct_fd);
    if (request.plain_fd >= 0) close(request.plain_fd);
}

class SignalsBlocked {
  public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

  private:
    sigset_t before_;
};

}  // namespace

int Engine::start() {
    if (options_.io_uring) {
        for (unsigned worker = 0; worker < options_.num_workers; ++worker) {
            rings_.push_back(std::make_unique<Ring>());
            if (const int error = rings_.back()->open(options_.queue_depth)) return error;
        }
    }
    const SignalsBlocked blocked;  // the workers inherit it: Python's main thread gets the signals
    try {
        for (unsigned worker = 0; worker < options_.num_workers; ++worker) {
            workers_.emplace_back(
                [this, worker] { options_.io_uring ? work_with_ring(worker) : work_with_calls(worker); });
        }
    } catch (const std::system_error& error) {
        return error.code().value();
    }
    return 0;
}

std::shared_ptr<Operation> Engine::submit(const Request& request) {
    auto operation = std::make_shared<Operation>();
    operation->request = request;
    if (request.length == 0) {
        close_files(request);
        operation->done = true;
        return operation;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) return nullptr;
    queue_.push_back(operation);
    active_.push_back(operation);
    work_.notify_all();
    return operation;
}

bool Engine::wait(const Operation& operation, double timeout_s) {
    std::unique_lock<std::mutex> lock(mutex_);
    return done_.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return operation.done; });
}

void Engine::stop() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
        work_.notify_all();
    }
    for (std::thread& worker : workers_) {
        if (worker.joinable()) worker.join();
    }
}

// The next piece for `worker`; false: there is none now, or, with `wait`, there will be none any more.
bool Engine::claim(unsigned worker, bool wait, Piece* piece) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        auto found = std::find_if(queue_.begin(), queue_.end(),
                                  [&](const auto& one) { return worker == 0 || !one->request.one_worker; });
        if (found != queue_.end()) {
            Operation& operation = **found;
            *piece = claim_piece(operation, options_.block_size);
            if (operation.all_claimed()) queue_.erase(found);
            return true;
        }
        if (!wait || stopping_) return false;
        work_.wait(lock);
    }
}

// The end of a piece. The first error of an operation ends it: what no worker has yet is dropped.
void Engine::finish(const Piece& piece, int error) {
    Operation& operation = *piece.operation;
    std::unique_lock<std::mutex> lock(mutex_);
    if (error != 0 && operation.error == 0) {
        operation.error = error;
        operation.error_offset = piece.offset;
        operation.error_length = piece.length;
        operation.claimed = operation.request.length;
        std::erase_if(queue_, [&](const auto& one) { return one.get() == &operation; });
    }
    if (--operation.num_in_flight > 0 || !operation.all_claimed()) return;
    lock.unlock();
    close_files(operation.request);
    lock.lock();
    operation.done = true;
    std::erase_if(active_, [&](const auto& one) { return one.get() == &operation; });  // may free it
    done_.notify_all();
}

// After a system call: true when the rest of the piece must be carried out by another one.
bool Engine::advance(Piece* piece, int64_t result) {
    const Request& request = piece->operation->request;
    if (result == -EINTR || result == -EAGAIN) return true;
    if (result == -EINVAL && piece->direct) {  // opened with O_DIRECT, and does not do it
        piece->direct = false;
        return true;
    }
    if (result <= 0) {
        finish(*piece, result < 0 ? int(-result) : request.write ? EIO : ENODATA);
        return false;
    }
    if (piece->bounce != nullptr && !request.write) std::memcpy(piece->data, piece->bounce, size_t(result));
    if (result == piece->length) {
        finish(*piece, 0);
        return false;
    }
    piece->data += result;
    piece->offset += result;
    piece->length -= result;
    if (piece->offset % request.file_align != 0) piece->direct = false;
    return true;
}

// Makes a piece ready for a system call. False: it has failed, for want of memory.
bool Engine::prepare(Slot* slot) {
    Piece& piece = slot->piece;
    piece.bounce = nullptr;
    if (!piece.needs_bounce()) return true;
    if (slot->bounce == nullptr) {
        void* memory = nullptr;
        const int64_t num_bytes = std::max(options_.block_size, piece.operation->request.file_align);
        if (const int error = posix_memalign(&memory, kBounceAlign, size_t(num_bytes))) {
            finish(piece, error);
            return false;
        }
        slot->bounce = static_cast<char*>(memory);
    }
    piece.bounce = slot->bounce;
    if (piece.operation->request.write) std::memcpy(piece.bounce, piece.data, size_t(piece.length));
    return true;
}

void Engine::work_with_calls(unsigned worker) {
    Slot slot;
    while (claim(worker, true, &slot.piece)) {
        while (prepare(&slot) && advance(&slot.piece, call(slot.piece))) {
        }
    }
    free(slot.bounce);
}

// Queues pieces for all free slots, waiting for the first one if nothing is in flight. Returns how many.
unsigned Engine::fill(unsigned worker, std::vector<Slot>* slots, std::vector<unsigned>* free) {
    unsigned num_filled = 0;
    while (!free->empty()) {
        Slot& slot = (*slots)[free->back()];
        if (!claim(worker, free->size() == slots->size(), &slot.piece)) break;
        if (!prepare(&slot)) continue;
        rings_[worker]->push(slot.piece, free->back());
        free->pop_back();
        ++num_filled;
        if (options_.single_submit) rings_[worker]->enter(0);  // what it does not take stays queued for the next one
    }
    return num_filled;
}

void Engine::work_with_ring(unsigned worker) {
    Ring& ring = *rings_[worker];
    std::vector<Slot> slots(options_.queue_depth);
    std::vector<unsigned> free;
    for (unsigned at = 0; at < options_.queue_depth; ++at) free.push_back(at);
    for (;;) {
        if (options_.overlap_events || free.size() == slots.size()) fill(worker, &slots, &free);
        if (free.size() == slots.size()) break;
        const int error = ring.enter(options_.overlap_events ? 1 : unsigned(slots.size() - free.size()));
        if (error == EAGAIN || error == EBUSY)
            sched_yield();  // the kernel is short of memory, or wants its results read
        if (error != 0 && error != EINTR && error != EAGAIN && error != EBUSY) {
            std::fprintf(stderr, "async_io: io_uring_enter: %s\n", std::strerror(error));
            std::abort();  // what the kernel still reads and writes cannot be known
        }
        uint64_t tag;
        int result;
        while (ring.pop(&tag, &result)) {
            Slot& slot = slots[tag];
            if (advance(&slot.piece, result) && prepare(&slot)) {
                ring.push(slot.piece, tag);
            } else {
                free.push_back(unsigned(tag));
            }
        }
    }
    for (Slot& slot : slots) ::free(slot.bounce);
}

}  // namespace ds_cpu::aio
