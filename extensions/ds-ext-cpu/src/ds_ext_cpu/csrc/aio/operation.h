// One read or write of a file, and how it is split into pieces that the file and the memory allow.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ds_cpu::aio {

// What the caller asks for. `direct_fd` was opened with O_DIRECT, or is -1; `plain_fd` goes through the page cache.
// Both are owned by the operation. Offsets and lengths are in bytes.
struct Request {
    bool write;
    int direct_fd;
    int plain_fd;
    char* data;
    int64_t length;
    int64_t offset;
    int64_t memory_align;  // of addresses that O_DIRECT takes
    int64_t file_align;    // of offsets and lengths that O_DIRECT takes, and no smaller than a page
    bool one_worker;
};

struct Operation {
    Request request;
    int64_t claimed = 0;        // bytes from the beginning that were given to a worker
    int64_t num_in_flight = 0;  // pieces
    int error = 0;              // the first errno
    int64_t error_offset = 0;   // in the file
    int64_t error_length = 0;
    bool done = false;

    bool all_claimed() const { return claimed == request.length; }
};

// A part of an operation that one system call can do. The ends of the range that are not aligned use the page cache: a
// write there changes no byte beside its range, whoever writes those, and sets the file's length to the byte. No page
// of an end is in the range of a direct piece, so the two ways never hold different bytes of one page.
struct Piece {
    Operation* operation = nullptr;
    char* data = nullptr;
    int64_t length = 0;
    int64_t offset = 0;
    bool direct = false;
    char* bounce = nullptr;  // aligned memory that is used instead of `data`; null: none is needed

    int fd() const { return direct ? operation->request.direct_fd : operation->request.plain_fd; }
    char* memory() const { return bounce != nullptr ? bounce : data; }
    bool needs_bounce() const {
        return direct && reinterpret_cast<uintptr_t>(data) % operation->request.memory_align != 0;
    }
};

// The next piece of an operation that has unclaimed bytes; at most `block_size` bytes, or one aligned unit.
inline Piece claim_piece(Operation& operation, int64_t block_size) {
    const Request& request = operation.request;
    const int64_t offset = request.offset + operation.claimed;
    const int64_t rest = request.length - operation.claimed;
    const int64_t align = request.file_align;
    Piece piece{&operation, request.data + operation.claimed, std::min(rest, block_size), offset};
    if (request.direct_fd >= 0) {
        piece.direct = offset % align == 0 && rest >= align;
        if (piece.direct) {
            const int64_t block = std::max(align, block_size / align * align);
            piece.length = std::min(block, rest / align * align);
        } else {
            piece.length = std::min(rest, align - offset % align);
        }
    }
    operation.claimed += piece.length;
    ++operation.num_in_flight;
    return piece;
}

}  // namespace ds_cpu::aio
