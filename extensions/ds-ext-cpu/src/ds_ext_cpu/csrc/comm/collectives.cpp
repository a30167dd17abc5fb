#include "comm/collectives.h"

#include <algorithm>
#include <cstring>

#include "comm/reduce.h"

namespace ds_cpu::comm {
namespace {

// Up to here a part costs less through a window than out of the memory of a peer, and two ranks make a whole sum each,
// to save a step.
constexpr size_t kSmallBytes = size_t{32} << 10;
// As much for three ranks and more, which read more.
constexpr size_t kTinyBytes = size_t{8} << 10;
// What is written twice, one after the other, in the cache nearest to the core.
constexpr size_t kHotBytes = size_t{16} << 10;
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
    reduce_to(data, describe(Kind::kAllReduce, op, dtype, 0, numel), true, timeout_ns);
}

void Collectives::reduce(char* data, size_t numel, Op op, Dtype dtype, int root, int64_t timeout_ns) {
    reduce_to(data, describe(Kind::kReduce, op, dtype, root, numel), root == group_.rank, timeout_ns);
}

// A window is given, summed in parts by all ranks, and taken back. Each step gives one window, sums the one before it,
// and takes the one before that, so that there is one wait for each. A rank's own part stays where it is.
void Collectives::reduce_to(char* data, Description mine, bool has_result, int64_t timeout_ns) {
    const Wait wait = begin(mine, timeout_ns);
    const auto op = static_cast<Op>(mine.op);
    const auto dtype = static_cast<Dtype>(mine.dtype);
    const int size = group_.size, rank = group_.rank;
    const size_t item = size_of(dtype), total = mine.numel * item, window = group_.layout.window_bytes;
    const size_t count = num_windows(total, window);
    const uint64_t first = windows_;
    const bool at_once =
        mine.kind == static_cast<uint32_t>(Kind::kReduce) || total <= (size == 2 ? kSmallBytes : kTinyBytes);
    const void* sources[kMaxRanks];
    const auto cut = [&](size_t number) {
        return Cut(in_window(total, window, number) / item, at_once ? 1 : size, item);
    };
    const auto give = [&](size_t number) {
        const size_t bytes = in_window(total, window, number);
        const Cut parts = cut(number);
        const size_t kept = at_once ? bytes : parts.start(rank) * item;
        const size_t after = at_once ? bytes : parts.start(rank + 1) * item;
        char* const to = group_.window(rank, first + number);
        const char* const from = data + number * window;
        copy(to, from, kept);
        copy(to + after, from + after, bytes - after);
    };
    if (size == 1) return;
    windows_ += count;
    if (count > 0) give(0);
    group_.sync(wait);
    check(mine);
    for (size_t number = 0; number < count; ++number) {
        const Cut parts = cut(number);
        const int part = at_once ? 0 : rank;
        const size_t stop = parts.start(part + 1) * item;
        for (size_t start = parts.start(part) * item; start < stop && has_result;) {
            const size_t bytes = std::min(kHotBytes, stop - start);
            for (int peer = 0; peer < size; ++peer) sources[peer] = group_.window(peer, first + number) + start;
            char* const to = data + number * window + start;
            if (!at_once) sources[rank] = to;
            comm::reduce(to, sources, size, bytes / item, op, dtype);
            if (!at_once) copy(group_.window(rank, first + number) + start, to, bytes);
            start += bytes;
        }
        if (number + 1 < count) give(number + 1);
        if (number + 1 < count || !at_once) group_.sync(wait);
        for (int offset = 1; offset < size && !at_once; ++offset) {
            const int peer = (rank + offset) % size;
            const size_t start = parts.start(peer) * item;
            copy(data + number * window + start, group_.window(peer, first + number) + start, parts.count(peer) * item);
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
    const size_t slot = group_.layout.window_bytes / size / kLine * kLine;
    const size_t count = num_windows(largest, slot);
    const auto give = [&](size_t number) {
        for (int peer = 0; peer < size; ++peer) {
            if (peer == rank) continue;
            copy(group_.window(rank, windows_) + slot * peer, inputs[peer].data + slot * number,
                 in_window(inputs[peer].num_bytes, slot, number));
        }
    };
    if (count > 0) give(0);
    group_.sync(wait);
    check(mine);
    check_sizes(true);
    const void* sources[kMaxRanks];
    for (size_t number = 0; number < count; ++number) {
        for (int peer = 0; peer < size; ++peer) sources[peer] = group_.window(peer, windows_) + slot * rank;
        sources[rank] = inputs[rank].data + slot * number;
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
    // a broadcast is as fast through windows
    const bool may_read = size == 1 || (group_.reads && kind != Kind::kBroadcast);
    if (may_read && (size == 1 || largest * inputs.size() > kSmallBytes)) {
        mine.windows = std::max<uint64_t>(mine.windows, 2);
    }
    const Wait wait = begin(mine, timeout_ns);
    const auto give = [&](size_t number) {
        for (size_t part = 0; part < inputs.size(); ++part) {
            copy(group_.window(rank, windows_) + slot * part, inputs[part].data + slot * number,
                 in_window(inputs[part].num_bytes, slot, number));
        }
    };
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
