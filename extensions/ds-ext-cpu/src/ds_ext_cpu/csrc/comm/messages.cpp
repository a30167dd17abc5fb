#include "comm/messages.h"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace ds_cpu::comm {
namespace {

// How often a sleeping thread looks whether peers live; and when nothing is in flight.
constexpr int64_t kLookNs = 100'000'000, kIdleNs = 500'000'000;
// Up to here a message is read from the sender's memory in one step; a larger one moves on both sides at once.
constexpr uint64_t kSmallBytes = uint64_t{32} << 10;

constexpr uint32_t value(OfferState state) { return static_cast<uint32_t>(state); }

}  // namespace

Messages::Messages(std::shared_ptr<Group> group)
    : kept_(std::move(group)), group_(*kept_), thread_([this] { run(); }) {}

void Messages::start(Message message) {
    Open ended;
    std::string failure;
    {
        const std::lock_guard lock(mutex_);
        open_.push_back(std::move(message));
        failure = attempt(&ended);
    }
    tell(ended, failure);
}

void Messages::poll() {
    Open ended;
    std::string failure;
    {
        const std::unique_lock lock(mutex_, std::try_to_lock);
        if (!lock.owns_lock()) return;
        failure = attempt(&ended);
    }
    tell(ended, failure);
}

void Messages::leave() {
    const std::lock_guard lock(mutex_);
    withdraw(!group_.has_failed());
    group_.close();
}

void Messages::stop() {
    leave();
    {
        const std::lock_guard lock(mutex_);
        is_stopped_ = true;
    }
    ring(group_.rank);
    if (thread_.joinable()) thread_.join();
}

void Messages::ring(int peer) {
    Cell& cell = group_.cell(peer);
    cell.bell.fetch_add(1);
    wake_sleepers(cell.bell, cell.bell_sleepers);
}

// The bell rings when a peer has changed anything; what this rank starts goes as far as it can without the thread.
void Messages::run() {
    Cell& own = group_.cell(group_.rank);
    while (true) {
        const uint32_t seen = own.bell.load();
        Open ended;
        std::string failure;
        bool is_idle, is_stopped;
        {
            const std::lock_guard lock(mutex_);
            failure = attempt(&ended);
            is_idle = open_.empty();
            is_stopped = is_stopped_;
        }
        tell(ended, failure);
        if (is_stopped) return;
        sleep_on(own.bell, own.bell_sleepers, seen, is_idle ? kIdleNs : kLookNs);
    }
}

// Each message as far as it goes. `ended` gets those that are over; what failed, and then all of them, or "".
std::string Messages::attempt(Open* ended) {
    if (open_.empty()) return "";
    try {
        if (!group_.is_open()) {
            const auto first =
                std::find_if(open_.begin(), open_.end(), [](const Message& each) { return !each.is_over; });
            Wait wait(nullptr, 0);
            wait.text = described(first == open_.end() ? open_.front() : *first);
            group_.check_open(wait);
        }
        // before the slots: what was over then is over, also where this thread did not run for long
        const Look look = look_at_peers();
        for (bool has_moved = true; has_moved;) {
            has_moved = false;
            for (auto place = open_.begin(); place != open_.end();) {
                const auto next = std::next(place);
                has_moved |= place->is_sent ? send(*place) : receive(*place);
                if (place->is_over) ended->splice(ended->end(), open_, place);
                place = next;
            }
        }
        fail_lost(look);
        return "";
    } catch (const Failure& failure) {
        withdraw(false);
        passing_ = nullptr;
        ended->splice(ended->end(), open_);
        return failure.what();
    }
}

// What has arrived is over. An offer is taken back before its memory is given back, the last one first, as the peer
// takes the first one. Where this rank `leaves`, and nothing failed, the peer still takes what lies in shared memory.
void Messages::withdraw(bool leaves) {
    for (auto message = open_.rbegin(); message != open_.rend(); ++message) {
        if (!message->is_sent || message->offer == nullptr || message->is_over) continue;
        uint32_t state = value(OfferState::kOffered);
        if (message->offer->state.compare_exchange_strong(state, value(OfferState::kWithdrawn))) continue;
        message->is_over = state == value(OfferState::kDone) ||
                           (state == value(OfferState::kGranted) && leaves && has_all_chunks(*message));
    }
}

// Without the lock: who is told may start the next message.
void Messages::tell(Open& ended, const std::string& failure) {
    for (Message& message : ended) message.done(message.is_over ? nullptr : &failure);
}

// Of the messages that have no slot yet: those between two ranks are offered in the order of issue, and taken so where
// they have the same tag.
bool Messages::is_first(const Message& message) const {
    for (const Message& other : open_) {
        if (&other == &message) return true;
        const bool is_same = other.is_sent == message.is_sent && other.peer == message.peer;
        if (is_same && other.offer == nullptr && (message.is_sent || other.tag == message.tag)) return false;
    }
    return true;
}

size_t Messages::in_chunk(const Message& message) const {
    return std::min<uint64_t>(group_.layout.chunk_bytes,
                              message.num_bytes - message.chunks * uint64_t{group_.layout.chunk_bytes});
}

bool Messages::send(Message& message) {
    if (message.offer == nullptr) {
        if (!is_first(message)) return false;
        Offer* const offers = group_.offers(group_.rank, message.peer);
        Offer* const end = offers + offers_per_pair(group_.size);
        Offer* const offer = std::find_if(offers, end, [](const Offer& slot) {
            return slot.state.load(std::memory_order_relaxed) == value(OfferState::kFree);
        });
        if (offer == end) return false;
        offer->tag = message.tag;
        offer->number = ++number_;
        offer->num_bytes = message.num_bytes;
        offer->address = reinterpret_cast<uint64_t>(message.data);
        offer->filled.store(0, std::memory_order_relaxed);
        offer->taken.store(0, std::memory_order_relaxed);
        offer->state.store(value(OfferState::kOffered), std::memory_order_release);
        message.offer = offer;
        ring(message.peer);
        return true;
    }
    Offer& offer = *message.offer;
    const uint32_t state = offer.state.load(std::memory_order_acquire);
    if (state == value(OfferState::kDone)) {
        if (passing_ == &message) passing_ = nullptr;
        offer.state.store(value(OfferState::kFree), std::memory_order_relaxed);
        message.is_over = true;
        return true;
    }
    if (state != value(OfferState::kGranted) || (passing_ != nullptr && passing_ != &message)) return false;
    passing_ = &message;
    bool has_moved = false;
    while (!has_all_chunks(message) && message.chunks - offer.taken.load(std::memory_order_acquire) < kChunks) {
        const size_t start = message.chunks * group_.layout.chunk_bytes;
        std::memcpy(group_.chunk(group_.rank, message.chunks), message.data + start, in_chunk(message));
        offer.filled.store(++message.chunks, std::memory_order_release);
        ring(message.peer);
        has_moved = true;
    }
    return has_moved;
}

// Of the offers with the message's tag that one look over the slots has seen, the one with the lowest number.
Offer* Messages::first_offer(const Message& message) const {
    Offer* first = nullptr;
    Offer* const offers = group_.offers(message.peer, group_.rank);
    for (Offer* offer = offers; offer != offers + offers_per_pair(group_.size); ++offer) {
        if (offer->state.load(std::memory_order_acquire) != value(OfferState::kOffered)) continue;
        if (offer->tag != message.tag) continue;
        if (first == nullptr || offer->number < first->number) first = offer;
    }
    return first;
}

bool Messages::receive(Message& message) {
    bool has_moved = false;
    if (message.offer == nullptr) {
        if (!is_first(message)) return false;
        uint32_t state = value(OfferState::kOffered);
        // One look may miss the first offer: it may come into a slot that was passed, and a later one into a slot that
        // was not. Who has seen the later one sees, in a look after that, all that were offered before it.
        if (first_offer(message) == nullptr) return false;
        Offer* const found = first_offer(message);
        if (found == nullptr) return false;  // withdrawn meanwhile
        Offer& offer = *found;
        if (offer.num_bytes != message.num_bytes) {
            group_.fail(group_.called(group_.rank) + " receives a message of " + std::to_string(message.num_bytes) +
                        " bytes with tag " + std::to_string(message.tag) + " from " + group_.called(message.peer) +
                        ", which sends one of " + std::to_string(offer.num_bytes) +
                        "; give both tensors of the same size and dtype");
        }
        if (message.num_bytes <= (group_.reads ? kSmallBytes : 0)) {
            if (message.num_bytes > 0) {
                Wait wait(nullptr, message.limit_ns);
                wait.text = described(message);
                group_.read(message.peer, offer.address, message.data, message.num_bytes, wait);
            }
            // withdrawn: what was read there may not be the message
            if (!offer.state.compare_exchange_strong(state, value(OfferState::kDone))) return false;
            ring(message.peer);
            message.is_over = true;
            return true;
        }
        if (!offer.state.compare_exchange_strong(state, value(OfferState::kGranted))) return false;
        message.offer = found;
        ring(message.peer);
        has_moved = true;
    }
    Offer& offer = *message.offer;
    while (message.chunks < offer.filled.load(std::memory_order_acquire)) {
        const size_t start = message.chunks * group_.layout.chunk_bytes;
        std::memcpy(message.data + start, group_.chunk(message.peer, message.chunks), in_chunk(message));
        offer.taken.store(++message.chunks, std::memory_order_release);
        has_moved = true;
        if (has_all_chunks(message)) {
            offer.state.store(value(OfferState::kDone), std::memory_order_release);
            ring(message.peer);
            message.is_over = true;
            return true;
        }
        ring(message.peer);
    }
    return has_moved;
}

std::string Messages::described(const Message& message) const {
    return (message.is_sent ? "sending " : "receiving ") + std::to_string(message.num_bytes) + " bytes with tag " +
           std::to_string(message.tag) + (message.is_sent ? " to " : " from ") + group_.called(message.peer);
}

// Now and then: nothing has ended where it is not time to look.
Messages::Look Messages::look_at_peers() {
    Look look{now_ns(), {}};
    if (look.time <= looked_ + kLookNs) return {};
    looked_ = look.time;
    std::bitset<kMaxRanks> peers;
    for (const Message& message : open_) peers.set(message.peer);
    for (int peer = 0; peer < group_.size; ++peer) look.gone[peer] = peers[peer] && !group_.lives(peer);
    return look;
}

void Messages::fail_lost(const Look& look) {
    for (const Message& message : open_) {
        if (look.gone[message.peer]) group_.check_alive(message.peer, described(message));
        if (look.time > message.deadline) {
            group_.fail(group_.called(group_.rank) + " waited " + Group::seconds(message.limit_ns) +
                        " (the timeout) in " + described(message) + ", whose process lives; does that rank " +
                        (message.is_sent ? "receive" : "send") + " it, with this tag?");
        }
    }
}

}  // namespace ds_cpu::comm
