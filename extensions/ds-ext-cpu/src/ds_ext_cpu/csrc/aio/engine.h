// The workers of one handle: threads that take pieces of the operations in turn and carry them out.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "aio/bounce.h"
#include "aio/operation.h"
#include "aio/ring.h"

namespace ds_cpu::aio {

struct Options {
    bool io_uring;         // else each worker does one pread or pwrite at a time
    int64_t block_size;    // bytes of a piece
    unsigned queue_depth;  // pieces in flight per worker, with io_uring
    bool single_submit;    // one system call per piece
    bool overlap_events;   // a finished piece makes room for the next one at once; else the whole batch is awaited
    unsigned num_workers;
};

class Engine {
  public:
    explicit Engine(const Options& options) : options_(options) {}
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;
    ~Engine() { stop(); }

    // Opens the rings and starts the workers. Returns 0 or an errno; then the engine must be destroyed.
    int start();

    // Takes over the descriptors of `request`. Null: the engine is stopped.
    std::shared_ptr<Operation> submit(const Request& request);

    // Whether the operation is done, after at most `timeout_s`.
    bool wait(const Operation& operation, double timeout_s);

    // Carries out everything that was submitted and ends the workers.
    void stop();

  private:
    bool claim(unsigned worker, bool wait, Piece* piece);
    void finish(const Piece& piece, int error);
    bool advance(Piece* piece, int64_t result);
    bool prepare(Piece* piece, Bounce* bounce, unsigned index);
    void work_with_calls(unsigned worker);
    void work_with_ring(unsigned worker);
    void fill(unsigned worker, std::vector<Piece>* pieces, std::vector<unsigned>* free, Bounce* bounce);

    const Options options_;
    std::mutex mutex_;
    std::condition_variable work_, done_;
    std::deque<std::shared_ptr<Operation>> queue_;    // those with unclaimed bytes
    std::vector<std::shared_ptr<Operation>> active_;  // those that are not done
    std::vector<std::unique_ptr<Ring>> rings_;
    std::vector<std::thread> workers_;
    bool stopping_ = false;
};

}  // namespace ds_cpu::aio
