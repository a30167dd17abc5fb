// io_uring by its three system calls: one submission and completion ring, used by one thread.
#pragma once

#include <linux/io_uring.h>

#include <cstdint>

#include "aio/operation.h"

namespace ds_cpu::aio {

class Ring {
  public:
    Ring() = default;
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;
    ~Ring();

    // Room for `depth` pieces. Returns 0 or an errno.
    int open(unsigned depth);

    // Queues one piece; `tag` comes back with its completion. There must be room.
    void push(const Piece& piece, uint64_t tag);

    // Gives queued pieces to the kernel and waits for at least `min_complete` completions. Returns 0 or an errno.
    int enter(unsigned min_complete);

    // Takes one completion; false: there is none. `result` is a byte count or a negative errno.
    bool pop(uint64_t* tag, int* result);

  private:
    int fd_ = -1;
    void* rings_ = nullptr;
    void* completions_ = nullptr;  // the second mapping of kernels before 5.4; else null
    io_uring_sqe* entries_ = nullptr;
    uint64_t rings_bytes_ = 0, completions_bytes_ = 0, entries_bytes_ = 0;
    unsigned *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    io_uring_cqe* cqes_ = nullptr;
    unsigned sq_mask_ = 0, cq_mask_ = 0;
    unsigned num_queued_ = 0;
};

}  // namespace ds_cpu::aio
