// Aligned memory of one worker for pieces whose own memory O_DIRECT does not take.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

namespace ds_cpu::aio {

// `count` buffers of at least `num_bytes` and at least a page, mapped when the first one is asked for; the system gives
// memory as they are touched. Huge pages are asked for: O_DIRECT then pins one page instead of 512.
class Bounce {
  public:
    Bounce(unsigned count, int64_t num_bytes)
        : num_bytes_(round_up(num_bytes, sysconf(_SC_PAGESIZE))), mapped_(count * num_bytes_) {}
    Bounce(const Bounce&) = delete;
    Bounce& operator=(const Bounce&) = delete;
    ~Bounce() {
        if (memory_ != nullptr) munmap(memory_, size_t(mapped_));
    }

    // The buffer `index`; null: there is no memory, `errno` says why.
    char* at(unsigned index) {
        if (memory_ == nullptr) memory_ = map();
        return memory_ == nullptr ? nullptr : memory_ + index * num_bytes_;
    }

  private:
    static constexpr int64_t kHuge = 1 << 21;

    static int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

    // Memory that begins at a huge page.
    char* map() const {
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS;
        void* found = mmap(nullptr, size_t(mapped_ + kHuge), PROT_READ | PROT_WRITE, flags, -1, 0);
        if (found == MAP_FAILED) return nullptr;
        char* begin = static_cast<char*>(found);
        const int64_t before = round_up(intptr_t(begin), kHuge) - intptr_t(begin);
        if (before > 0) munmap(begin, size_t(before));
        munmap(begin + before + mapped_, size_t(kHuge - before));
        madvise(begin + before, size_t(mapped_), MADV_HUGEPAGE);  // may be refused: slower, not wrong
        return begin + before;
    }

    const int64_t num_bytes_, mapped_;
    char* memory_ = nullptr;
};

}  // namespace ds_cpu::aio
