// Runs the collectives of a group one after the other: in the thread that asks where nothing is before them, else in
// one of its own.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace ds_cpu::comm {

class Runner {
  public:
    using Job = std::function<void()>;  // raises nothing

    ~Runner() { stop(); }

    // Runs `job`, or leaves it to the thread: always where `is_async`, as nobody may wait for it.
    void run(Job job, bool is_async) {
        std::unique_lock lock(mutex_);
        if (!is_async && jobs_.empty() && !is_busy_) {
            is_busy_ = true;
            lock.unlock();
            job();
            job = nullptr;
            lock.lock();
            is_busy_ = false;
            if (!jobs_.empty() || is_stopped_) changed_.notify_all();
            return;
        }
        if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
        jobs_.push_back(std::move(job));
        changed_.notify_all();
    }

    // Returns when all jobs are over.
    void stop() {
        {
            const std::lock_guard lock(mutex_);
            is_stopped_ = true;
        }
        changed_.notify_all();
        if (thread_.joinable()) thread_.join();
    }

  private:
    void work() {
        std::unique_lock lock(mutex_);
        while (true) {
            changed_.wait(lock, [this] { return (!jobs_.empty() || is_stopped_) && !is_busy_; });
            if (jobs_.empty()) return;
            Job job = std::move(jobs_.front());
            jobs_.pop_front();
            is_busy_ = true;
            lock.unlock();
            job();
            job = nullptr;  // what it holds goes here, not under the lock
            lock.lock();
            is_busy_ = false;
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Job> jobs_;
    bool is_busy_ = false;
    bool is_stopped_ = false;
    std::thread thread_;
};

}  // namespace ds_cpu::comm
