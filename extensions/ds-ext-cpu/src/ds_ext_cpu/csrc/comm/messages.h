// Messages between two ranks of a group: any number at once, in any order, matched by tag and, within a tag, by order.
//
// A sender offers a message; the receiver who wants it reads it from the sender's memory, or grants it, whereupon the
// sender passes it through its pool of chunks. Only granted messages use the pool, so that none waits for one which
// nobody takes.
#pragma once

#include <functional>
#include <list>
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
    std::function<void(const std::string* failure)> done;  // called once, by the thread of the messages
    Offer* offer = nullptr;                                // the slot in the segment, once there is one
    uint32_t chunks = 0;                                   // that this side has moved
    bool is_over = false;
};

class Messages {
  public:
    explicit Messages(Group& group);
    ~Messages() { stop(); }

    void start(Message message);
    // Ends the thread; what is unfinished fails.
    void stop();

  private:
    using Open = std::list<Message>;
    void run();
    void accept();
    bool advance();
    bool send(Message& message);
    bool receive(Message& message);
    bool is_first(const Message& message) const;
    void finish(Message& message);
    void look_at_peers();
    void fail_all(const std::string& text);
    void ring(int peer);
    std::string described(const Message& message) const;
    size_t in_chunk(const Message& message) const;

    Group& group_;
    std::mutex mutex_;  // guards `arrived_` and `is_stopped_`
    Open arrived_;
    bool is_stopped_ = false;
    Open open_;                   // of the thread, in the order of issue
    Message* passing_ = nullptr;  // the one that uses this rank's pool
    uint64_t number_ = 0;
    std::thread thread_;
};

}  // namespace ds_cpu::comm
