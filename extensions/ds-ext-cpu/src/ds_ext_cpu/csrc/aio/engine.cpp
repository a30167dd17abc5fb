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

// Makes a piece ready for a system call; `index`: of its buffer in `bounce`. False: it has failed, for want of memory.
bool Engine::prepare(Piece* piece, Bounce* bounce, unsigned index) {
    piece->bounce = nullptr;
    if (!piece->needs_bounce()) return true;
    piece->bounce = bounce->at(index);
    if (piece->bounce == nullptr) {
        finish(*piece, errno);
        return false;
    }
    if (piece->operation->request.write) std::memcpy(piece->bounce, piece->data, size_t(piece->length));
    return true;
}

void Engine::work_with_calls(unsigned worker) {
    Bounce bounce(1, options_.block_size);
    Piece piece;
    while (claim(worker, true, &piece)) {
        while (prepare(&piece, &bounce, 0) && advance(&piece, call(piece))) {
        }
    }
}

// Queues a piece for each index in `free`, waiting for the first one if nothing is in flight.
void Engine::fill(unsigned worker, std::vector<Piece>* pieces, std::vector<unsigned>* free, Bounce* bounce) {
    Ring& ring = *rings_[worker];
    while (!free->empty()) {
        const unsigned index = free->back();
        Piece& piece = (*pieces)[index];
        if (!claim(worker, free->size() == pieces->size(), &piece)) break;
        if (!prepare(&piece, bounce, index)) continue;
        ring.push(piece, index);
        free->pop_back();
        // A copied piece goes at once: the disk works while the next one is copied. What the kernel does not take now
        // stays queued.
        if (options_.single_submit || piece.bounce != nullptr) ring.enter(0);
    }
}

void Engine::work_with_ring(unsigned worker) {
    Ring& ring = *rings_[worker];
    Bounce bounce(options_.queue_depth, options_.block_size);
    std::vector<Piece> pieces(options_.queue_depth);
    std::vector<unsigned> free;
    for (unsigned index = options_.queue_depth; index > 0; --index) free.push_back(index - 1);  // 0 is taken first
    for (;;) {
        if (free.size() == pieces.size()) fill(worker, &pieces, &free, &bounce);
        if (free.size() == pieces.size()) break;
        const int error = ring.enter(options_.overlap_events ? 1 : unsigned(pieces.size() - free.size()));
        if (error == EAGAIN || error == EBUSY)
            sched_yield();  // the kernel is short of memory, or wants its results read
        if (error != 0 && error != EINTR && error != EAGAIN && error != EBUSY) {
            std::fprintf(stderr, "async_io: io_uring_enter: %s\n", std::strerror(error));
            std::abort();  // what the kernel still reads and writes cannot be known
        }
        uint64_t tag;
        int result;
        while (ring.pop(&tag, &result)) {
            Piece& piece = pieces[tag];
            if (advance(&piece, result) && prepare(&piece, &bounce, unsigned(tag))) {
                ring.push(piece, tag);
                continue;
            }
            free.push_back(unsigned(tag));
            if (options_.overlap_events) fill(worker, &pieces, &free, &bounce);
        }
    }
}

}  // namespace ds_cpu::aio
