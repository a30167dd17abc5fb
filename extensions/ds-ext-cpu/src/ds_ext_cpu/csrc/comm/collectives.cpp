#include "comm/collectives.h"

#include <algorithm>
#include <cstring>

#include "comm/reduce.h"

namespace ds_cpu::comm {
namespace {

// Up to here reading a peer's memory costs more than passing through a window.
constexpr size_t kSmallBytes = size_t{32} << 10;
// Up to here each rank of three or more makes the whole sum, to save a step.
constexpr size_t kTinyBytes = size_t{8} << 10;
// Of all ranks together, read and added at a time: what the cache of a core holds.
constexpr size_t kBlockBytes = size_t{512} << 10;

size_t num_windows(size_t num_bytes, size_t window) { return (num_bytes + window - 1) / window; }

void copy(char* to, const char* from, size_t num_bytes) {
    if (to != from && num_bytes > 0) std::memcpy(to, from, num_bytes);
}

// Of `num_bytes` cut into windows, those of window `number`.
size_t in_window(size_t num_bytes, size_t window, size_t number) {
    const size_t start = window * number;
    return start >= num_bytes ? 0 : std::min(window, num_bytes - start);
}

// Elements cut for ranks, each part beginning at a cache line.
struct Cut {
    Cut(size_t numel, int size, size_t item) : numel(numel), step(rounded((numel + size - 1) / size, kLine / item)) {}
    size_t start(int rank) const { return std::min(numel, step * rank); }
    size_t count(int rank) const { return start(rank + 1) - start(rank); }
    size_t numel, step;
};

Description describe(Kind kind, Op op, Dtype dtype, int root, size_t numel) {
    Description description;
    description.kind = static_cast<uint32_t>(kind);
    description.op = static_cast<uint32_t>(op);
    description.dtype = static_cast<uint32_t>(dtype);
    description.root = static_cast<uint32_t>(root);
    description.numel = numel;
    description.windows = 0;
    return description;
}

Description::Span span_of(const void* data, size_t num_bytes) {
    return {reinterpret_cast<uint64_t>(data), num_bytes, kNothingWanted};
}

}  // namespace

char* Collectives::scratch(size_t num_bytes) {
    if (scratch_.size() < num_bytes + kLine) scratch_.resize(num_bytes + kLine);
    return reinterpret_cast<char*>(rounded(reinterpret_cast<size_t>(scratch_.data()), kLine));
}

bool Collectives::reads(size_t num_bytes) const {
    return group_.size == 1 || (group_.reads && num_bytes > kSmallBytes);
}

// All peers are past the collective before the last one: its description is free, and two of the windows.
Wait Collectives::begin(Description& mine, int64_t timeout_ns) {
    mine.number = ++number_;
    const Wait wait(&mine, timeout_ns);
    group_.check_open(wait);
    const size_t used = offsetof(Description, spans) + sizeof(Description::Span) * group_.size;
    std::memcpy(static_cast<void*>(&group_.cell(group_.rank).descriptions[number_ % 2]), &mine, used);
    return wait;
}

void Collectives::check(const Description& mine) {
    for (int peer = 0; peer < group_.size; ++peer) {
        const Description& its = of(peer);
        if (std::memcmp(&its, &mine, offsetof(Description, windows)) == 0) continue;
        const std::string own_text = described(mine), its_text = described(its);
        group_.fail(group_.called(group_.rank) + " makes " + own_text + " where " + group_.called(peer) + " makes " +
                    its_text + " (collective " + std::to_string(number_) +
                    " of the group); all ranks of a group issue the same collectives, with the same sizes, in the same "
                    "order. Have they the same model, and the same parameters that require a gradient?");
    }
}

// Of every pair, so that all ranks raise.
void Collectives::check_sizes(bool splits) {
    for (int to = 0; to < group_.size; ++to) {
        for (int from = 0; from < group_.size; ++from) {
            const uint64_t wanted = of(to).spans[from].wanted, given = of(from).spans[splits ? to : 0].num_bytes;
            if (wanted == kNothingWanted || wanted == given) continue;
            group_.fail(group_.called(to) + " expects " + std::to_string(wanted) + " bytes from " +
                        group_.called(from) + " in " + described(of(to)) + ", which gives it " + std::to_string(given) +
                        "; the sizes that two ranks give for each other must agree");
        }
    }
}

void Collectives::barrier(int64_t timeout_ns) {
    Description mine = describe(Kind::kBarrier, Op::kNone, Dtype::kBytes, 0, 0);
    const Wait wait = begin(mine, timeout_ns);
    group_.sync(wait);
    check(mine);
}

void Collectives::all_reduce(char* data, size_t numel, Op op, Dtype dtype, int64_t timeout_ns) {
    Description mine = describe(Kind::kAllReduce, op, dtype, 0, numel);
    mine.spans[0] = span_of(data, numel * size_of(dtype));
    const Wait wait = begin(mine, timeout_ns);
    const auto run =
        reads(mine.spans[0].num_bytes) ? &Collectives::reduce_by_reading : &Collectives::reduce_through_windows;
    (this->*run)(data, mine, true, wait);
}

void Collectives::reduce(char* data, size_t numel, Op op, Dtype dtype, int root, int64_t timeout_ns) {
    Description mine = describe(Kind::kReduce, op, dtype, root, numel);
    mine.spans[0] = span_of(data, numel * size_of(dtype));
    const Wait wait = begin(mine, timeout_ns);
    const auto run =
        reads(mine.spans[0].num_bytes) ? &Collectives::reduce_by_reading : &Collectives::reduce_through_windows;
    (this->*run)(data, mine, false, wait);
}

// The sum of `numel` elements that lie `offset` bytes into that span of every rank.
void Collectives::sum_range(char* to, const char* own, int span, uint64_t offset, const Description& mine, size_t numel,
                            const Wait& wait) {
    const auto op = static_cast<Op>(mine.op);
    const auto dtype = static_cast<Dtype>(mine.dtype);
    const size_t item = size_of(dtype), total = numel * item, others = std::max(group_.size - 1, 1);
    const size_t block = std::max(kBlockBytes / others, size_t{16} << 10) / kLine * kLine;
    const size_t step = std::min(block, rounded(total, kLine));
    char* const staged = scratch(step * others);
    const void* sources[kMaxRanks];
    for (size_t start = 0; start < total; start += step) {
        const size_t count = std::min(step, total - start);
        char* into = staged;
        for (int peer = 0; peer < group_.size; ++peer) {
            if (peer == group_.rank) {
                sources[peer] = own + start;
                continue;
            }
            group_.read(peer, of(peer).spans[span].address + offset + start, into, count, wait);
            sources[peer] = into;
            into += step;
        }
        comm::reduce(to + start, sources, group_.size, count / item, op, dtype);
    }
}

// Each rank sums one part, and reads the others' when they are summed. Not to all: the root sums everything.
void Collectives::reduce_by_reading(char* data, const Description& mine, bool to_all, const Wait& wait) {
    const size_t item = size_of(static_cast<Dtype>(mine.dtype));
    const int rank = group_.rank;
    group_.sync(wait);
    check(mine);
    if (!to_all) {
        if (static_cast<int>(mine.root) == rank) sum_range(data, data, 0, 0, mine, mine.numel, wait);
        group_.sync(wait);
        return;
    }
    const Cut cut(mine.numel, group_.size, item);
    char* const own = data + cut.start(rank) * item;
    sum_range(own, own, 0, cut.start(rank) * item, mine, cut.count(rank), wait);
    group_.post();
    for (int offset = 1; offset < group_.size; ++offset) {
        const int peer = (rank + offset) % group_.size;
        group_.wait_for(peer, wait);
        const size_t start = cut.start(peer) * item;
        group_.read(peer, of(peer).spans[0].address + start, data + start, cut.count(peer) * item, wait);
    }
    group_.sync(wait);
}

// A window is given, summed in parts by all ranks, and taken back. Each step gives one window, sums the one before it,
// and takes the one before that, so that there is one wait for each.
void Collectives::reduce_through_windows(char* data, const Description& mine, bool to_all, const Wait& wait) {
    const auto op = static_cast<Op>(mine.op);
    const auto dtype = static_cast<Dtype>(mine.dtype);
    const size_t item = size_of(dtype), total = mine.numel * item, window = group_.layout.window_bytes;
    const size_t count = num_windows(total, window);
    const uint64_t first = windows_;
    const bool has_result = to_all || static_cast<int>(mine.root) == group_.rank;
    const bool at_once = !to_all || total <= (group_.size == 2 ? kSmallBytes : kTinyBytes);
    const void* sources[kMaxRanks];
    const auto give = [&](size_t number) {
        copy(group_.window(group_.rank, first + number), data + number * window, in_window(total, window, number));
    };
    windows_ += count;
    if (count > 0) give(0);
    group_.sync(wait);
    check(mine);
    for (size_t number = 0; number < count; ++number) {
        const size_t bytes = in_window(total, window, number);
        const Cut cut(bytes / item, at_once ? 1 : group_.size, item);
        const int part = at_once ? 0 : group_.rank;
        const size_t start = cut.start(part) * item;
        char* const to = at_once ? data + number * window : group_.window(group_.rank, first + number) + start;
        for (int peer = 0; peer < group_.size; ++peer) sources[peer] = group_.window(peer, first + number) + start;
        if (has_result) comm::reduce(to, sources, group_.size, cut.count(part), op, dtype);
        if (number + 1 < count) give(number + 1);
        if (number + 1 < count || !at_once) group_.sync(wait);
        for (int peer = 0; peer < group_.size && !at_once; ++peer) {
            const size_t its = cut.start(peer) * item;
            copy(data + number * window + its, group_.window(peer, first + number) + its, cut.count(peer) * item);
        }
    }
}

void Collectives::reduce_scatter(char* output, std::span<const Part> inputs, Op op, Dtype dtype, int64_t timeout_ns) {
    const int size = group_.size, rank = group_.rank;
    const size_t item = size_of(dtype), total = inputs[rank].num_bytes;
    Description mine = describe(Kind::kReduceScatter, op, dtype, 0, 0);
    size_t largest = 0;
    for (int peer = 0; peer < size; ++peer) {
        mine.numel += inputs[peer].num_bytes / item;
        mine.spans[peer] = span_of(inputs[peer].data, inputs[peer].num_bytes);
        mine.spans[peer].wanted = total;
        largest = std::max(largest, inputs[peer].num_bytes);
    }
    const Wait wait = begin(mine, timeout_ns);
    const bool by_reading = reads(mine.numel * item);
    const size_t slot = group_.layout.window_bytes / size / kLine * kLine;
    const size_t count = by_reading ? 0 : num_windows(largest, slot);
    const auto give = [&](size_t number) {
        for (int peer = 0; peer < size; ++peer) {
            copy(group_.window(rank, windows_) + slot * peer, inputs[peer].data + slot * number,
                 in_window(inputs[peer].num_bytes, slot, number));
        }
    };
    if (count > 0) give(0);
    group_.sync(wait);
    check(mine);
    check_sizes(true);
    if (by_reading) {
        sum_range(output, inputs[rank].data, rank, 0, mine, total / item, wait);
        group_.sync(wait);
        return;
    }
    const void* sources[kMaxRanks];
    for (size_t number = 0; number < count; ++number) {
        for (int peer = 0; peer < size; ++peer) sources[peer] = group_.window(peer, windows_) + slot * rank;
        comm::reduce(output + slot * number, sources, size, in_window(total, slot, number) / item, op, dtype);
        ++windows_;
        if (number + 1 < count) {
            give(number + 1);
            group_.sync(wait);
        }
    }
}

void Collectives::move(Kind kind, std::span<const Part> inputs, std::span<const Part> outputs, Dtype dtype, int root,
                       size_t numel, int64_t timeout_ns) {
    const int size = group_.size, rank = group_.rank;
    const bool splits =
        kind == Kind::kAllToAll || kind == Kind::kScatter;  // a part for each rank, in shares of a window
    const size_t slot = splits ? group_.layout.window_bytes / size / kLine * kLine : group_.layout.window_bytes;
    Description mine = describe(kind, Op::kNone, dtype, root, numel);
    size_t largest = 0;
    for (int peer = 0; peer < size; ++peer) {
        const Part part = static_cast<size_t>(peer) < inputs.size() ? inputs[peer] : Part{};
        mine.spans[peer] = span_of(part.data, part.num_bytes);
        if (!outputs.empty()) mine.spans[peer].wanted = outputs[peer].num_bytes;
        largest = std::max(largest, part.num_bytes);
    }
    mine.windows = num_windows(largest, slot);
    if (reads(largest * inputs.size())) mine.windows = std::max<uint64_t>(mine.windows, 2);
    const Wait wait = begin(mine, timeout_ns);
    const auto give = [&](size_t number) {
        for (size_t part = 0; part < inputs.size(); ++part) {
            copy(group_.window(rank, windows_) + slot * part, inputs[part].data + slot * number,
                 in_window(inputs[part].num_bytes, slot, number));
        }
    };
    const bool may_read = group_.reads || size == 1;
    if (!may_read || mine.windows < 2) give(0);
    group_.sync(wait);
    check(mine);
    check_sizes(splits);
    uint64_t count = 0;
    for (int peer = 0; peer < size; ++peer) count = std::max(count, of(peer).windows);
    if (!outputs.empty() && outputs[rank].num_bytes > 0) {
        copy(outputs[rank].data, inputs[splits ? rank : 0].data, outputs[rank].num_bytes);
    }
    const bool by_reading = may_read && count > 1;
    for (uint64_t number = 0; number < (by_reading ? 1 : count); ++number) {
        for (int offset = 1; offset < size && !outputs.empty(); ++offset) {
            const int peer = (rank + offset) % size;
            const Part& to = outputs[peer];
            if (by_reading) {
                group_.read(peer, of(peer).spans[splits ? rank : 0].address, to.data, to.num_bytes, wait);
            } else {
                copy(to.data + slot * number, group_.window(peer, windows_) + (splits ? slot * rank : 0),
                     in_window(to.num_bytes, slot, number));
            }
        }
        if (!by_reading) ++windows_;
        if (!by_reading && number + 1 < count) give(number + 1);
        if (by_reading || number + 1 < count) group_.sync(wait);
    }
}

}  // namespace ds_cpu::comm
