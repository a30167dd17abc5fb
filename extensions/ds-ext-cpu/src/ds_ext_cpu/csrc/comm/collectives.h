// The collectives of one group, each run to its end by the thread that calls it.
#pragma once

#include <span>

#include "comm/group.h"

namespace ds_cpu::comm {

// Bytes that come from a rank, or go to one.
struct Part {
    char* data = nullptr;
    size_t num_bytes = 0;
};

class Collectives {
  public:
    explicit Collectives(Group& group) : group_(group) {}

    // In place on every rank; `kReduce`: on `root` alone, and the others keep their numbers.
    void all_reduce(char* data, size_t numel, Op op, Dtype dtype, int64_t timeout_ns);
    void reduce(char* data, size_t numel, Op op, Dtype dtype, int root, int64_t timeout_ns);
    // `inputs[r]` is for rank r, of the same size on all ranks. `output` may be this rank's own.
    void reduce_scatter(char* output, std::span<const Part> inputs, Op op, Dtype dtype, int64_t timeout_ns);
    void barrier(int64_t timeout_ns);

    // Moves parts between ranks: `inputs` has one part for all ranks, one for each, or none; `outputs` is where the
    // part from each rank goes, or empty. `numel` is what all ranks must agree on, 0 where they need not.
    void move(Kind kind, std::span<const Part> inputs, std::span<const Part> outputs, Dtype dtype, int root,
              size_t numel, int64_t timeout_ns);

    uint64_t number() const { return number_; }

  private:
    Wait begin(Description& mine, int64_t timeout_ns);
    void check(const Description& mine);
    void check_sizes(bool splits);
    const Description& of(int peer) const { return group_.cell(peer).descriptions[number_ % 2]; }
    void reduce_to(char* data, Description mine, bool has_result, int64_t timeout_ns);

    Group& group_;
    uint64_t number_ = 0;   // of the collective
    uint64_t windows_ = 0;  // that passed
};

}  // namespace ds_cpu::comm
