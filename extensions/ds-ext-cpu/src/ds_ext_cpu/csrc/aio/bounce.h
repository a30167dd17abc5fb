// Aligned memory of one worker for pieces whose own memory O_DIRECT does not take.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

namespace ds_cpu::aio {

// `count` buffers of at least `num_bytes` and at least a page. Addresses are reserved when the first one is asked for;
// only what was asked for counts as memory of the process. Huge pages are asked for: O_DIRECT then pins one page
// instead of 512.
class Bounce {
  public:
    Bounce(unsigned count, int64_t num_bytes)
        : num_bytes_(round_up(num_bytes, sysconf(_SC_PAGESIZE))), reserved_(round_up(count * num_bytes_, kHuge)) {}
    Bounce(const Bounce&) = delete;
    Bounce& operator=(const Bounce&) = delete;
    ~Bounce() {
        if (begin_ != nullptr) munmap(begin_, size_t(reserved_));
    }

    // The buffer `index`; null: there is no memory, `errno` says why.
    char* at(unsigned index) {
        if (begin_ == nullptr && (begin_ = reserve()) == nullptr) return nullptr;
        const int64_t end = round_up((index + 1) * num_bytes_, kHuge);
        if (end > usable_) {
            if (mprotect(begin_ + usable_, size_t(end - usable_), PROT_READ | PROT_WRITE) != 0) return nullptr;
            usable_ = end;
        }
        return begin_ + index * num_bytes_;
    }

  private:
    static constexpr int64_t kHuge = 1 << 21;

    static int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

    // Addresses that begin at a huge page.
    char* reserve() const {
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void* found = mmap(nullptr, size_t(reserved_ + kHuge), PROT_NONE, flags, -1, 0);
        if (found == MAP_FAILED) return nullptr;
        char* begin = static_cast<char*>(found);
        const int64_t before = round_up(intptr_t(begin), kHuge) - intptr_t(begin);
        if (before > 0) munmap(begin, size_t(before));
        if (before < kHuge) munmap(begin + before + reserved_, size_t(kHuge - before));
        madvise(begin + before, size_t(reserved_), MADV_HUGEPAGE);  // may be refused: slower, not wrong
        return begin + before;
    }

    const int64_t num_bytes_, reserved_;
    int64_t usable_ = 0;  // from the beginning
    char* begin_ = nullptr;
};

}  // namespace ds_cpu::aio
