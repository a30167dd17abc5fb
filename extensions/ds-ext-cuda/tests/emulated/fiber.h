// A fiber: a stack of its own on which a function runs until it waits, and goes on later. One OS thread runs them all.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdint>
#include <new>

#ifdef __SANITIZE_ADDRESS__
    #include <sanitizer/common_interface_defs.h>
#endif

namespace ds_emulated {

// Stacks are reserved for as many threads as a block may have; pages that are not touched cost nothing.
constexpr size_t kStackBytes = 256 * 1024;

class Fiber {
  public:
    Fiber() {
        page_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        stack_ = static_cast<char*>(mmap(nullptr, page_ + kStackBytes, PROT_READ | PROT_WRITE,
                                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        if (stack_ == MAP_FAILED) throw std::bad_alloc();
        mprotect(stack_, page_, PROT_NONE);  // a stack that overflows faults
    }
    ~Fiber() { munmap(stack_, page_ + kStackBytes); }
    Fiber(const Fiber&) = delete;

    // The next `go_on` begins at `entry`, which never returns: it ends by `leave`. What ran here before is forgotten.
    void begin(void (*entry)()) {
        getcontext(&context_);
        context_.uc_stack.ss_sp = stack_ + page_;
        context_.uc_stack.ss_size = kStackBytes;
        context_.uc_link = nullptr;
        makecontext(&context_, entry, 0);
        fake_stack_ = nullptr;
    }

    // Called from the scheduler: runs the fiber until it yields or leaves.
    void go_on() {
#ifdef __SANITIZE_ADDRESS__
        void* fake_stack = nullptr;
        __sanitizer_start_switch_fiber(&fake_stack, stack_ + page_, kStackBytes);
#endif
        swapcontext(&scheduler(), &context_);
#ifdef __SANITIZE_ADDRESS__
        __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
    }

    // Called on the fiber, first of all.
    void entered() {
#ifdef __SANITIZE_ADDRESS__
        __sanitizer_finish_switch_fiber(fake_stack_, &outer_stack(), &outer_bytes());
#endif
    }

    // Called on the fiber: back to the scheduler, until the next `go_on`.
    void yield() {
#ifdef __SANITIZE_ADDRESS__
        __sanitizer_start_switch_fiber(&fake_stack_, outer_stack(), outer_bytes());
#endif
        swapcontext(&context_, &scheduler());
        entered();
    }

    // Called on the fiber: back to the scheduler, for good.
    [[noreturn]] void leave() {
#ifdef __SANITIZE_ADDRESS__
        __sanitizer_start_switch_fiber(nullptr, outer_stack(), outer_bytes());
#endif
        setcontext(&scheduler());
        __builtin_unreachable();
    }

  private:
    static ucontext_t& scheduler() {
        static ucontext_t context;
        return context;
    }
    static const void*& outer_stack() {
        static const void* stack;
        return stack;
    }
    static size_t& outer_bytes() {
        static size_t bytes;
        return bytes;
    }

    ucontext_t context_;
    char* stack_;
    size_t page_;
    void* fake_stack_ = nullptr;
};

}  // namespace ds_emulated
