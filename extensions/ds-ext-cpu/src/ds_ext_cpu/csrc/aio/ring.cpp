#include "aio/ring.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace ds_cpu::aio {

namespace {

void* map(int fd, uint64_t num_bytes, uint64_t what) {
    void* address = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, off_t(what));
    return address == MAP_FAILED ? nullptr : address;
}

unsigned* at(void* base, unsigned offset) { return reinterpret_cast<unsigned*>(static_cast<char*>(base) + offset); }

}  // namespace

int Ring::open(unsigned depth) {
    io_uring_params params;
    std::memset(&params, 0, sizeof params);
    fd_ = int(syscall(__NR_io_uring_setup, depth, &params));
    if (fd_ < 0) return errno;
    rings_bytes_ = params.sq_off.array + params.sq_entries * sizeof(unsigned);
    completions_bytes_ = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    const bool together = params.features & IORING_FEAT_SINGLE_MMAP;
    if (together) rings_bytes_ = std::max(rings_bytes_, completions_bytes_);
    rings_ = map(fd_, rings_bytes_, IORING_OFF_SQ_RING);
    if (rings_ == nullptr) return errno;
    if (!together) {
        completions_ = map(fd_, completions_bytes_, IORING_OFF_CQ_RING);
        if (completions_ == nullptr) return errno;
    }
    entries_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    entries_ = static_cast<io_uring_sqe*>(map(fd_, entries_bytes_, IORING_OFF_SQES));
    if (entries_ == nullptr) return errno;
    void* completed = together ? rings_ : completions_;
    sq_tail_ = at(rings_, params.sq_off.tail);
    sq_array_ = at(rings_, params.sq_off.array);
    sq_mask_ = *at(rings_, params.sq_off.ring_mask);
    cq_head_ = at(completed, params.cq_off.head);
    cq_tail_ = at(completed, params.cq_off.tail);
    cq_mask_ = *at(completed, params.cq_off.ring_mask);
    cqes_ = reinterpret_cast<io_uring_cqe*>(at(completed, params.cq_off.cqes));
    return 0;
}

Ring::~Ring() {
    if (entries_ != nullptr) munmap(entries_, entries_bytes_);
    if (completions_ != nullptr) munmap(completions_, completions_bytes_);
    if (rings_ != nullptr) munmap(rings_, rings_bytes_);
    if (fd_ >= 0) close(fd_);
}

void Ring::push(const Piece& piece, uint64_t tag) {
    const unsigned tail = *sq_tail_;  // this thread alone writes it
    const unsigned index = tail & sq_mask_;
    io_uring_sqe& entry = entries_[index];
    std::memset(&entry, 0, sizeof entry);
    entry.opcode = piece.operation->request.write ? IORING_OP_WRITE : IORING_OP_READ;
    entry.fd = piece.fd();
    entry.addr = reinterpret_cast<uint64_t>(piece.memory());
    entry.len = uint32_t(piece.length);
    entry.off = uint64_t(piece.offset);
    entry.user_data = tag;
    sq_array_[index] = index;
    __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
    ++num_queued_;
}

int Ring::enter(unsigned min_complete) {
    const unsigned flags = min_complete > 0 ? IORING_ENTER_GETEVENTS : 0;
    const long taken = syscall(__NR_io_uring_enter, fd_, num_queued_, min_complete, flags, nullptr, 0);
    if (taken < 0) return errno;
    num_queued_ -= unsigned(taken);
    return 0;
}

bool Ring::pop(uint64_t* tag, int* result) {
    const unsigned head = *cq_head_;  // this thread alone writes it
    if (head == __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) return false;
    const io_uring_cqe& found = cqes_[head & cq_mask_];
    *tag = found.user_data;
    *result = found.res;
    __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
    return true;
}

}  // namespace ds_cpu::aio
