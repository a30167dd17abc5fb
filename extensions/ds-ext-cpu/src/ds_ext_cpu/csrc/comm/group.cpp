#include "comm/group.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

namespace ds_cpu::comm {
namespace {

// A rank looks this often, about 30 us long, before it sleeps; fewer times where ranks share cores.
constexpr int kLooks = 600, kFewLooks = 20;
// How often a sleeping rank looks whether its peer lives.
constexpr int64_t kLookNs = 100'000'000;
constexpr uint64_t kMagic = 0x6473'6363'6c30'3031;

int num_cores() {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace

thread_local std::function<bool()>* Group::interrupted = nullptr;

uint64_t start_time_of(int64_t process) {
    char path[64], text[1024];
    std::snprintf(path, sizeof path, "/proc/%lld/stat", static_cast<long long>(process));
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    const ssize_t count = ::read(file, text, sizeof text - 1);
    close(file);
    if (count <= 0) return 0;
    text[count] = '\0';
    const char* field = std::strrchr(text, ')');  // the name before it may hold anything
    if (field == nullptr || field[1] != ' ') return 0;
    const char state = field[2];
    if (state == 'Z' || state == 'X' || state == 'x') return 0;
    field += 2;
    for (int number = 3; number < 22 && field != nullptr; ++number) {
        field = std::strchr(field, ' ');
        if (field != nullptr) ++field;
    }
    return field == nullptr ? 0 : std::strtoull(field, nullptr, 10);
}

std::string described(const Description& description) {
    const auto kind = static_cast<Kind>(description.kind);
    const auto op = static_cast<Op>(description.op);
    const auto dtype = static_cast<Dtype>(description.dtype);
    std::string text = name(kind);
    if (kind == Kind::kNone || kind == Kind::kBarrier) return text;
    if (op != Op::kNone) text += std::string(" (") + name(op) + ")";
    if (description.numel != 0) text += " of " + std::to_string(description.numel);
    text += std::string(description.numel != 0 ? " " : " of ") + name(dtype);
    const bool is_from = kind == Kind::kBroadcast || kind == Kind::kScatter;
    if (is_from || kind == Kind::kReduce || kind == Kind::kGather) {
        text += (is_from ? " from rank " : " to rank ") + std::to_string(description.root) + " of the group";
    }
    return text;
}

std::string Wait::what() const {
    if (!text.empty()) return text;
    return description == nullptr ? "connecting the ranks" : described(*description);
}

Group::Group(void* segment, int rank, int size, std::vector<int> ranks)
    : rank(rank),
      size(size),
      layout(size),
      base_(static_cast<char*>(segment)),
      head_(reinterpret_cast<Head*>(base_)),
      cells_(reinterpret_cast<Cell*>(base_ + layout.cells)),
      offers_(reinterpret_cast<Offer*>(base_ + layout.offers)),
      ranks_(std::move(ranks)),
      num_looks_(size <= num_cores() ? kLooks : kFewLooks) {
    std::random_device random;
    proof_ = (uint64_t{random()} << 32) | random();
}

Group::~Group() {
    close();
    munmap(base_, layout.num_bytes);
}

void Group::close() noexcept {
    if (cells_[rank].has_left.exchange(1) == 0) wake_all();
}

void Group::wake_all() noexcept {
    for (int peer = 0; peer < size; ++peer) {
        Cell& cell = cells_[peer];
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&cell.tick), FUTEX_WAKE, INT_MAX, 0, 0, 0);
        cell.bell.fetch_add(1);
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&cell.bell), FUTEX_WAKE, INT_MAX, 0, 0, 0);
    }
}

void Group::connect(Wish wish, int64_t timeout_ns) {
    const Wait wait(nullptr, timeout_ns);
    Cell& own = cells_[rank];
    own.process = getpid();
    own.start_time = start_time_of(getpid());
    own.proof_address = reinterpret_cast<uint64_t>(&proof_);
    own.proof = proof_;
    own.wish = static_cast<uint32_t>(wish);
    sync(wait);
    bool can_read = true;
    for (int peer = 0; peer < size; ++peer) {
        uint64_t found = 0;
        const iovec here{&found, sizeof found};
        const iovec there{reinterpret_cast<void*>(cells_[peer].proof_address), sizeof found};
        can_read &= process_vm_readv(cells_[peer].process, &here, 1, &there, 1, 0) == sizeof found &&
                    found == cells_[peer].proof;
        // in another name space of processes its number means nothing here
        own.is_strange |= start_time_of(cells_[peer].process) != cells_[peer].start_time;
    }
    own.can_read = can_read;
    sync(wait);
    bool all_read = true;
    int reader = -1, sharer = -1, blind = -1;
    for (int peer = 0; peer < size; ++peer) {
        const Cell& cell = cells_[peer];
        if (cell.wish == static_cast<uint32_t>(Wish::kRead)) reader = peer;
        if (cell.wish == static_cast<uint32_t>(Wish::kShm)) sharer = peer;
        if (cell.can_read == 0) blind = peer;
        all_read &= cell.can_read != 0;
    }
    if (reader >= 0 && sharer >= 0) {
        fail("DS_CCL_TRANSPORT is 'read' on " + called(reader) + " and 'shm' on " + called(sharer) +
             "; set the same on all ranks, or none");
    }
    if (reader >= 0 && blind >= 0) {
        fail("DS_CCL_TRANSPORT=read on " + called(reader) + ", but the kernel does not let " + called(blind) +
             " read the memory of its peers (process_vm_readv; see /proc/sys/kernel/yama/ptrace_scope and the rules of "
             "the container); unset it, or set it to 'shm'");
    }
    reads = all_read && sharer < 0;
}

void Group::post() {
    Cell& own = cells_[rank];
    own.tick.store(++tick_, std::memory_order_seq_cst);
    wake_sleepers(own.tick, own.tick_sleepers);
}

void Group::wait_for(int peer, const Wait& wait) {
    const uint32_t target = tick_;
    for (int number = 0; number < num_looks_; ++number) {
        if (look(peer, target)) return;
        pause();
    }
    Cell& cell = cells_[peer];
    for (bool looks = false;;) {
        // before the tick: a peer that came and then left has come, also where this thread did not run for long
        const int64_t left = wait.deadline - now_ns();
        const bool is_gone = looks && !lives(peer);
        const uint32_t seen = cell.tick.load(std::memory_order_acquire);
        if (static_cast<int32_t>(seen - target) >= 0) return;
        check_open(wait);
        if (is_gone) check_alive(peer, wait.what());
        if (left <= 0) fail_late(peer, wait);
        if (looks && interrupted != nullptr && (*interrupted)()) {
            fail(called(rank) + " was interrupted in " + wait.what());
        }
        looks = !sleep_on(cell.tick, cell.tick_sleepers, seen, std::min(left, kLookNs)) || has_left(peer);
    }
}

void Group::sync(const Wait& wait) {
    post();
    for (int offset = 1; offset < size; ++offset) wait_for((rank + offset) % size, wait);
    if (has_failed()) raise_failure(wait.what());
}

void Group::read(int peer, uint64_t address, void* to, size_t num_bytes, const Wait& wait) {
    auto* into = static_cast<char*>(to);
    while (num_bytes > 0) {
        const iovec here{into, num_bytes}, there{reinterpret_cast<void*>(address), num_bytes};
        const ssize_t count = process_vm_readv(cells_[peer].process, &here, 1, &there, 1, 0);
        const int error = errno;
        if (has_left(peer)) check_alive(peer, wait.what());  // and may have written there meanwhile
        if (count <= 0) {
            if (has_failed()) raise_failure(wait.what());
            check_alive(peer, wait.what());
            fail(called(rank) + " cannot read the memory of " + called(peer) + " in " + wait.what() + ": " +
                 std::strerror(error) + "; set DS_CCL_TRANSPORT=shm, with which no memory is read");
        }
        into += count, address += count, num_bytes -= count;
    }
}

void Group::abort(const std::string& text) noexcept {
    uint32_t none = 0;
    if (!head_->fault.compare_exchange_strong(none, 1)) return;
    head_->fault_rank = rank;
    std::snprintf(head_->text, kTextBytes, "%s", text.c_str());
    head_->fault.store(2);
    wake_all();
}

void Group::fail(const std::string& text) {
    abort(text);
    throw Failure(text);
}

void Group::raise_failure(const std::string& what) const {
    const int64_t limit = now_ns() + kLookNs;
    while (head_->fault.load(std::memory_order_acquire) == 1 && now_ns() < limit) pause();  // it is being written
    const bool is_whole = head_->fault.load(std::memory_order_acquire) == 2;
    throw Failure(called(rank) + " cannot finish " + what + ": " +
                  (is_whole ? std::string(head_->text) : "another rank failed"));
}

bool Group::lives(int peer) const {
    const Cell& cell = cells_[peer];
    if (has_left(peer)) return false;
    if (cells_[rank].is_strange || cell.process == 0) return true;
    return start_time_of(cell.process) == cell.start_time;
}

void Group::check_alive(int peer, const std::string& what) {
    if (lives(peer)) return;
    if (has_left(peer)) {
        fail(called(peer) + " has left the group, where " + called(rank) + " waits for it in " + what +
             "; it left out a call that this rank makes, or failed: its own output says why");
    }
    fail("the process of " + called(peer) + " (" + std::to_string(cells_[peer].process) + ") has ended, where " +
         called(rank) + " waits for it in " + what + "; its own output says why");
}

std::string Group::seconds(int64_t ns) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3g s", static_cast<double>(ns) * 1e-9);
    return text;
}

void Group::fail_late(int peer, const Wait& wait) {
    check_alive(peer, wait.what());
    const Description* last = &cells_[peer].descriptions[0];
    if (cells_[peer].descriptions[1].number > last->number) last = &cells_[peer].descriptions[1];
    std::string text = called(rank) + " waited " + seconds(wait.limit_ns) + " (the timeout) for " + called(peer) +
                       " in " + wait.what() + "; the process of " + called(peer) +
                       " lives, and its last collective of this group is ";
    text += last->number == 0 ? "none" : "number " + std::to_string(last->number) + ", " + described(*last);
    fail(text + ". Did it leave out a call, or does it work for longer than the timeout?");
}

}  // namespace ds_cpu::comm
