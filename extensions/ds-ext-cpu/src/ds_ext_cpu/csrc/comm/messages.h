// Messages between two ranks of a group: any number at once, in any order, matched by tag and, within a tag, by order.
//
// A sender offers a message; the receiver who wants it grants it, whereupon the sender passes it through its pool of
// chunks. A small one is read from the sender's memory where that is possible. Only granted messages use the pool, so
// that none waits for one which nobody takes.
#pragma once

#include <bitset>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

#include "comm/group.h"

namespace ds_cpu::comm {

struct Message {
    bool is_sent;  // else received
    int peer;
    uint32_t tag;
    char* data;
    uint64_t num_bytes;
    int64_t limit_ns, deadline;
    std::function<void(const std::string* failure)> done;  // called once, by any thread
    Offer* offer = nullptr;                                // the slot in the segment, once there is one
    uint32_t chunks = 0;                                   // that this side has moved
    bool is_over = false;
};

class Messages {
  public:
    explicit Messages(std::shared_ptr<Group> group);
    ~Messages() { stop(); }

    // Goes as far as it goes at once; the thread does the rest.
    void start(Message message);
    // As much as can be done now, by a thread that waits for a message.
    void poll();
    // Closes the group: what is unfinished fails, and peers take none of it after that. What lies whole in shared
    // memory is sent. The thread says so.
    void leave();
    // Leaves, and ends the thread.
    void stop();

  private:
    using Open = std::list<Message>;
    void run();
    std::string attempt(Open* ended);
    bool send(Message& message);
    bool receive(Message& message);
    Offer* first_offer(const Message& message) const;
    bool is_first(const Message& message) const;
    // What ends messages, but for those that are over.
    struct Look {
        int64_t time = 0;
        std::bitset<kMaxRanks> gone;
    };
    Look look_at_peers();
    void fail_lost(const Look& look);
    void withdraw(bool leaves);
    bool has_all_chunks(const Message& message) const {
        return message.chunks * uint64_t{group_.layout.chunk_bytes} >= message.num_bytes;
    }
    static void tell(Open& ended, const std::string& failure);
    void ring(int peer);
    std::string described(const Message& message) const;
    size_t in_chunk(const Message& message) const;

    const std::shared_ptr<Group> kept_;
    Group& group_;
    std::mutex mutex_;  // guards the rest, but for the thread
    bool is_stopped_ = false;
    int64_t looked_ = 0;
    Open open_;                   // in the order of issue
    Message* passing_ = nullptr;  // the one that uses this rank's pool
    uint64_t number_ = 0;
    std::thread thread_;
};

}  // namespace ds_cpu::comm
