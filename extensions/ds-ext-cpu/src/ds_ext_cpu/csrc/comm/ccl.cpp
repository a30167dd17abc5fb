// The process group that torch sees: it checks tensors, and runs collectives of `collectives.h` on their memory. The
// one file here that includes torch; ds_ext_cpu/comm/ccl.py makes the segment, and registers the group with torch.
#include <sys/mman.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "comm/collectives.h"
#include "comm/messages.h"
#include "comm/reduce.h"
#include "comm/runner.h"

namespace {

using at::Tensor;
using c10d::OpType;
using c10d::Work;
using ds_cpu::comm::Collectives;
using ds_cpu::comm::Dtype;
using ds_cpu::comm::Failure;
using ds_cpu::comm::Group;
using ds_cpu::comm::Kind;
using ds_cpu::comm::Layout;
using ds_cpu::comm::Message;
using ds_cpu::comm::Messages;
using ds_cpu::comm::Op;
using ds_cpu::comm::Part;
using ds_cpu::comm::Runner;
using ds_cpu::comm::Wish;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;
using Milliseconds = std::chrono::milliseconds;

constexpr Milliseconds kSignalsEvery{100};
// About 50 us.
constexpr int kPolls = 300;

std::exception_ptr as_torch_error(const std::string& text) {
    return std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, __LINE__}, text));
}

// What a signal raised in Python, such as KeyboardInterrupt; null: nothing. Only the main thread gets signals.
std::exception_ptr raised_by_signal() {
    pybind11::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() == 0) return nullptr;
    python_error error;
    error.persist();
    return std::make_exception_ptr(error);
}

class CCLWork : public Work {
  public:
    CCLWork(int rank, OpType type, const char* title, const Tensors& inputs, Tensors outputs)
        : Work(rank, type, title, inputs),
          outputs_(std::move(outputs)),
          future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

    void complete(const std::exception_ptr& error) {
        if (error != nullptr) {
            future_->setError(error);
        } else {
            future_->markCompleted(c10::IValue(outputs_));
        }
        finish(error);
    }

    // What a waiting thread does meanwhile, for a while.
    void set_poll(std::function<void()> poll) { poll_ = std::move(poll); }

    bool wait(Milliseconds timeout) override {
        for (int number = 0; number < kPolls && poll_ && !isCompleted(); ++number) {
            poll_();
            ds_cpu::comm::pause();
        }
        const bool is_limited = timeout.count() > 0;
        const auto deadline = std::chrono::steady_clock::now() + timeout;
        std::unique_lock lock(mutex_);
        while (!cv_.wait_for(lock, kSignalsEvery, [this] { return completed_; })) {
            lock.unlock();
            if (const std::exception_ptr raised = raised_by_signal()) std::rethrow_exception(raised);
            if (is_limited && std::chrono::steady_clock::now() > deadline) {
                std::rethrow_exception(as_torch_error("wait(): the work is not over after " +
                                                      std::to_string(timeout.count()) + " ms; it goes on"));
            }
            lock.lock();
        }
        if (exception_ != nullptr) std::rethrow_exception(exception_);
        return true;
    }

    Tensors result() override { return outputs_; }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  private:
    Tensors outputs_;
    c10::intrusive_ptr<c10::ivalue::Future> future_;
    std::function<void()> poll_;
};

// Several works as one.
class Together : public Work {
  public:
    Together(int rank, std::vector<WorkPtr> works) : Work(rank, OpType::COALESCED), works_(std::move(works)) {}

    bool isCompleted() override {
        for (const WorkPtr& work : works_) {
            if (!work->isCompleted()) return false;
        }
        return true;
    }

    bool wait(Milliseconds timeout) override {
        for (const WorkPtr& work : works_) work->wait(timeout);
        return true;
    }

  private:
    std::vector<WorkPtr> works_;
};

Dtype dtype_of(const Tensor& tensor) {
    switch (tensor.scalar_type()) {
        case at::kFloat:
            return Dtype::kFloat;
        case at::kDouble:
            return Dtype::kDouble;
        case at::kBFloat16:
            return Dtype::kBf16;
        case at::kHalf:
            return Dtype::kFp16;
        case at::kChar:
            return Dtype::kInt8;
        case at::kByte:
            return Dtype::kUint8;
        case at::kShort:
            return Dtype::kInt16;
        case at::kInt:
            return Dtype::kInt32;
        case at::kLong:
            return Dtype::kInt64;
        case at::kBool:
            return Dtype::kBool;
        default:
            return Dtype::kBytes;
    }
}

Op op_of(const c10d::ReduceOp& op, const Tensor& tensor) {
    const auto asked = static_cast<c10d::ReduceOp::RedOpType>(op);
    const Op found = asked <= c10d::ReduceOp::BXOR
                         ? std::array{Op::kSum, Op::kAverage, Op::kProduct, Op::kMin,
                                      Op::kMax, Op::kAnd,     Op::kOr,      Op::kXor}[static_cast<size_t>(asked)]
                         : Op::kNone;
    TORCH_CHECK_VALUE(found != Op::kNone,
                      "ccl: this reduction is not here (PREMUL_SUM?); multiply before, and use SUM, AVG, PRODUCT, MIN, "
                      "MAX, BAND, BOR or BXOR");
    TORCH_CHECK_VALUE(ds_cpu::comm::can_reduce(found, dtype_of(tensor)), "ccl: '", ds_cpu::comm::name(found),
                      "' of tensors of ", tensor.scalar_type(),
                      " is not defined here; floating-point numbers have sum, average, product, min and max, integers "
                      "and, or and xor too. Convert the tensor first");
    return found;
}

void check(const Tensor& tensor) {
    TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.layout() == at::kStrided, "ccl: found a ", tensor.layout(),
                      " tensor on ", tensor.device(), "; it moves dense tensors in host memory");
}

const Tensor& only(const Tensors& tensors, const char* asked) {
    TORCH_CHECK_VALUE(tensors.size() == 1, "ccl: ", asked, " takes one tensor, found ", tensors.size());
    check(tensors[0]);
    return tensors[0];
}

// A tensor as one range of memory: itself where it is one, else a copy, which `give_back` copies to where it came from.
class Flat {
  public:
    explicit Flat(const Tensor& tensor) : tensor_(tensor) {
        check(tensor);
        flat_ = tensor.is_contiguous() ? tensor : tensor.contiguous();
    }
    char* data() const { return static_cast<char*>(flat_.data_ptr()); }
    size_t num_bytes() const { return flat_.nbytes(); }
    Part part() const { return {data(), num_bytes()}; }
    const Tensor& tensor() const { return tensor_; }
    void give_back() const {
        if (flat_.is_same(tensor_)) return;
        at::AutoDispatchBelowADInplaceOrView guard;  // in a thread of ours nothing is recorded
        tensor_.copy_(flat_);
    }

  private:
    Tensor tensor_, flat_;
};

std::vector<Flat> flat(const Tensors& tensors) { return {tensors.begin(), tensors.end()}; }

std::vector<Part> parts_of(const std::vector<Flat>& tensors) {
    std::vector<Part> parts;
    for (const Flat& each : tensors) parts.push_back(each.part());
    return parts;
}

void give_back(const std::vector<Flat>& tensors) {
    for (const Flat& each : tensors) each.give_back();
}

// Equal parts of a range of memory.
std::vector<Part> cut(const Part& whole, int count) {
    std::vector<Part> parts;
    const size_t step = whole.num_bytes / count;
    for (int index = 0; index < count; ++index) parts.push_back({whole.data + step * index, step});
    return parts;
}

template <typename Options>
bool is_async(const Options& options) {
    if constexpr (requires { options.asyncOp; }) return options.asyncOp;
    return true;
}

class ProcessGroupCCL : public c10d::Backend {
  public:
    ProcessGroupCCL(int segment, int rank, int size, std::vector<int> ranks, Milliseconds timeout,
                    const std::string& wish)
        : Backend(rank, size), timeout_(timeout), process_(getpid()) {
        const size_t num_bytes = Layout(size).num_bytes;
        void* const memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, segment, 0);
        TORCH_CHECK(memory != MAP_FAILED, "ccl: ", num_bytes,
                    " bytes of shared memory cannot be mapped: ", std::strerror(errno));
        core_ = std::make_unique<Core>(memory, rank, size, std::move(ranks));
        const Wish wished = wish == "read" ? Wish::kRead : wish == "shm" ? Wish::kShm : Wish::kAny;
        const std::exception_ptr error =
            attempt([&] { core_->group.connect(wished, std::chrono::nanoseconds(timeout).count()); }, true);
        if (error != nullptr) std::rethrow_exception(error);
    }

    ~ProcessGroupCCL() override {
        if (getpid() != process_) {  // a child of the process that made it has no threads
            static_cast<void>(core_.release());
            return;
        }
        leave();
        if (Py_IsInitialized() == 0 || is_finalizing()) {  // a thread may need what Python has no more
            static_cast<void>(core_.release());
            return;
        }
        if (PyGILState_Check() != 0) {
            pybind11::gil_scoped_release no_gil;
            core_.reset();
        } else {
            core_.reset();
        }
    }

    const std::string getBackendName() const override { return "ccl"; }
    std::string transport() const { return core_->group.reads ? "read" : "shm"; }

    void setTimeout(Milliseconds timeout) override { timeout_ = timeout; }
    c10::intrusive_ptr<Options> getBackendOptions() override { return c10::make_intrusive<Options>("ccl", timeout_); }
    void setSequenceNumberForGroup() override {}
    uint64_t getSequenceNumberForGroup() override { return num_started_; }
    void startCoalescing() override {
        const std::lock_guard lock(mutex_);
        is_coalescing_ = true;
    }
    WorkPtr endCoalescing() override {
        const std::lock_guard lock(mutex_);
        is_coalescing_ = false;
        return c10::make_intrusive<Together>(getRank(), std::exchange(coalesced_, {}));
    }
    void shutdown() override { leave(); }
    void abort() override { fail(core_->group.called(getRank()) + " aborted the group; its own output says why"); }
    // All ranks that wait here, or come to wait, raise this.
    void fail(const std::string& text) { core_->group.abort(text); }

    WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
        const Flat data(only(tensors, "all_reduce"));
        const Op op = op_of(options.reduceOp, data.tensor());
        return start(OpType::ALLREDUCE, "ccl:all_reduce", tensors, tensors, options, [=](Collectives& run, int64_t ns) {
            run.all_reduce(data.data(), data.tensor().numel(), op, dtype_of(data.tensor()), ns);
            data.give_back();
        });
    }

    WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
        const std::vector<Flat> all = flat(tensors);
        std::vector<Op> ops;
        for (const Tensor& tensor : tensors) ops.push_back(op_of(options.reduceOp, tensor));
        return start(OpType::ALLREDUCE_COALESCED, "ccl:all_reduce", tensors, tensors, options,
                     [=](Collectives& run, int64_t ns) {
                         for (size_t index = 0; index < all.size(); ++index) {
                             const Tensor& tensor = all[index].tensor();
                             run.all_reduce(all[index].data(), tensor.numel(), ops[index], dtype_of(tensor), ns);
                         }
                         give_back(all);
                     });
    }

    WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
        const Flat data(only(tensors, "reduce"));
        const Op op = op_of(options.reduceOp, data.tensor());
        const auto root = static_cast<int>(options.rootRank);
        return start(OpType::REDUCE, "ccl:reduce", tensors, tensors, options, [=, this](Collectives& run, int64_t ns) {
            run.reduce(data.data(), data.tensor().numel(), op, dtype_of(data.tensor()), root, ns);
            if (root == getRank()) data.give_back();
        });
    }

    WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
        const Flat data(only(tensors, "broadcast"));
        const auto root = static_cast<int>(options.rootRank);
        return start(OpType::BROADCAST, "ccl:broadcast", tensors, tensors, options,
                     [=, this](Collectives& run, int64_t ns) {
                         std::vector<Part> inputs, outputs;
                         if (root == getRank()) {
                             inputs.push_back(data.part());
                         } else {
                             outputs.resize(getSize());
                             outputs[root] = data.part();
                         }
                         move(run, Kind::kBroadcast, inputs, outputs, data.tensor(), root, true, ns);
                         if (root != getRank()) data.give_back();
                     });
    }

    WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
        const Flat input(only(inputs, "all_gather"));
        TORCH_CHECK_VALUE(outputs.size() == 1, "ccl: all_gather takes one list of outputs, found ", outputs.size());
        check_count(outputs[0], "all_gather", "outputs");
        const std::vector<Flat> to = flat(outputs[0]);
        return start(OpType::ALLGATHER, "ccl:all_gather", inputs, outputs[0], options,
                     [=, this](Collectives& run, int64_t ns) {
                         move(run, Kind::kAllGather, {input.part()}, parts_of(to), input.tensor(), 0, false, ns);
                         give_back(to);
                     });
    }

    WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
        Tensors outputs{output}, inputs{input};
        return allgather_into_tensor_coalesced(outputs, inputs, options);
    }

    WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::AllgatherOptions& options) override {
        check_sizes(outputs, inputs, "all_gather_into_tensor");
        const std::vector<Flat> from = flat(inputs), to = flat(outputs);
        return start(OpType::_ALLGATHER_BASE, "ccl:all_gather_into_tensor", inputs, outputs, options,
                     [=, this](Collectives& run, int64_t ns) {
                         for (size_t index = 0; index < from.size(); ++index) {
                             move(run, Kind::kAllGather, {from[index].part()}, cut(to[index].part(), getSize()),
                                  from[index].tensor(), 0, true, ns);
                         }
                         give_back(to);
                     });
    }

    WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                const c10d::AllgatherOptions& options) override {
        TORCH_CHECK_VALUE(outputs.size() == static_cast<size_t>(getSize()), "ccl: all_gather_coalesced takes ",
                          getSize(), " lists of outputs, one per rank, found ", outputs.size());
        std::vector<std::vector<Flat>> to;
        Tensors all;
        for (const Tensors& of_rank : outputs) {
            TORCH_CHECK_VALUE(of_rank.size() == inputs.size(), "ccl: all_gather_coalesced of ", inputs.size(),
                              " tensors found a list of ", of_rank.size(), " outputs");
            to.push_back(flat(of_rank));
            all.insert(all.end(), of_rank.begin(), of_rank.end());
        }
        const std::vector<Flat> from = flat(inputs);
        return start(OpType::ALLGATHER_COALESCED, "ccl:all_gather", inputs, all, options,
                     [=, this](Collectives& run, int64_t ns) {
                         for (size_t index = 0; index < from.size(); ++index) {
                             std::vector<Part> parts;
                             for (const std::vector<Flat>& of_rank : to) parts.push_back(of_rank[index].part());
                             move(run, Kind::kAllGather, {from[index].part()}, parts, from[index].tensor(), 0, false,
                                  ns);
                         }
                         for (const std::vector<Flat>& of_rank : to) give_back(of_rank);
                     });
    }

    WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                           const c10d::ReduceScatterOptions& options) override {
        const Flat output(only(outputs, "reduce_scatter"));
        TORCH_CHECK_VALUE(inputs.size() == 1, "ccl: reduce_scatter takes one list of inputs, found ", inputs.size());
        check_count(inputs[0], "reduce_scatter", "inputs");
        const Tensor& own = inputs[0][getRank()];
        TORCH_CHECK_VALUE(own.numel() == output.tensor().numel() && own.scalar_type() == output.tensor().scalar_type(),
                          "ccl: reduce_scatter found an output of ", output.tensor().numel(), " elements of ",
                          output.tensor().scalar_type(), " for an input of ", own.numel(), " of ", own.scalar_type());
        const Op op = op_of(options.reduceOp, output.tensor());
        const std::vector<Flat> from = flat(inputs[0]);
        return start(OpType::REDUCE_SCATTER, "ccl:reduce_scatter", inputs[0], outputs, options,
                     [=](Collectives& run, int64_t ns) {
                         run.reduce_scatter(output.data(), parts_of(from), op, dtype_of(output.tensor()), ns);
                         output.give_back();
                     });
    }

    WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
        Tensors outputs{output}, inputs{input};
        return reduce_scatter_tensor_coalesced(outputs, inputs, options);
    }

    WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::ReduceScatterOptions& options) override {
        check_sizes(inputs, outputs, "reduce_scatter_tensor");
        const std::vector<Flat> from = flat(inputs), to = flat(outputs);
        std::vector<Op> ops;
        for (const Tensor& tensor : outputs) ops.push_back(op_of(options.reduceOp, tensor));
        return start(OpType::_REDUCE_SCATTER_BASE, "ccl:reduce_scatter_tensor", inputs, outputs, options,
                     [=, this](Collectives& run, int64_t ns) {
                         for (size_t index = 0; index < from.size(); ++index) {
                             run.reduce_scatter(to[index].data(), cut(from[index].part(), getSize()), ops[index],
                                                dtype_of(to[index].tensor()), ns);
                         }
                         give_back(to);
                     });
    }

    WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                          std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
        TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type(), "ccl: all_to_all found an input of ",
                          input.scalar_type(), " and an output of ", output.scalar_type());
        const Flat from(input), to(output);
        const std::vector<Part> inputs = split(from, input_sizes), outputs = split(to, output_sizes);
        return start(OpType::ALLTOALL_BASE, "ccl:all_to_all", {input}, {output}, options,
                     [=, this](Collectives& run, int64_t ns) {
                         move(run, Kind::kAllToAll, inputs, outputs, from.tensor(), 0, false, ns);
                         to.give_back();
                     });
    }

    WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
        check_count(outputs, "all_to_all", "outputs");
        check_count(inputs, "all_to_all", "inputs");
        const std::vector<Flat> from = flat(inputs), to = flat(outputs);
        return start(OpType::ALLTOALL, "ccl:all_to_all", inputs, outputs, options,
                     [=, this](Collectives& run, int64_t ns) {
                         move(run, Kind::kAllToAll, parts_of(from), parts_of(to), from[0].tensor(), 0, false, ns);
                         give_back(to);
                     });
    }

    WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
        const Flat input(only(inputs, "gather"));
        const auto root = static_cast<int>(options.rootRank);
        Tensors all;
        if (root == getRank()) {
            TORCH_CHECK_VALUE(outputs.size() == 1, "ccl: gather takes one list of outputs, found ", outputs.size());
            check_count(outputs[0], "gather", "outputs");
            all = outputs[0];
        }
        const std::vector<Flat> to = flat(all);
        return start(OpType::GATHER, "ccl:gather", inputs, all, options, [=, this](Collectives& run, int64_t ns) {
            move(run, Kind::kGather, {input.part()}, parts_of(to), input.tensor(), root, false, ns);
            give_back(to);
        });
    }

    WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
        const Flat output(only(outputs, "scatter"));
        const auto root = static_cast<int>(options.rootRank);
        Tensors all;
        if (root == getRank()) {
            TORCH_CHECK_VALUE(inputs.size() == 1, "ccl: scatter takes one list of inputs, found ", inputs.size());
            check_count(inputs[0], "scatter", "inputs");
            all = inputs[0];
        }
        const std::vector<Flat> from = flat(all);
        return start(OpType::SCATTER, "ccl:scatter", all, outputs, options, [=, this](Collectives& run, int64_t ns) {
            std::vector<Part> parts(getSize());
            parts[root] = output.part();
            move(run, Kind::kScatter, parts_of(from), parts, output.tensor(), root, false, ns);
            output.give_back();
        });
    }

    WorkPtr barrier(const c10d::BarrierOptions& options) override {
        return start(OpType::BARRIER, "ccl:barrier", {}, {}, options,
                     [](Collectives& run, int64_t ns) { run.barrier(ns); });
    }

    WorkPtr send(Tensors& tensors, int to, int tag) override { return message(tensors, to, tag, true); }
    WorkPtr recv(Tensors& tensors, int from, int tag) override { return message(tensors, from, tag, false); }
    WorkPtr recvAnysource(Tensors&, int) override {
        TORCH_CHECK_NOT_IMPLEMENTED(false, "ccl: recv from any rank is not here; give the rank (src), or use gloo");
    }

  private:
    struct Core {
        Core(void* memory, int rank, int size, std::vector<int> ranks)
            : shared(std::make_shared<Group>(memory, rank, size, std::move(ranks))),
              group(*shared),
              collectives(group) {}
        std::shared_ptr<Group> shared;
        Group& group;
        Collectives collectives;
        std::shared_ptr<Messages> messages;
        Runner runner;
    };

    static bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
        return Py_IsFinalizing() != 0;
#else
        return _Py_IsFinalizing() != 0;
#endif
    }

    void leave() {
        std::unique_lock lock(mutex_);
        const std::shared_ptr<Messages> messages = core_->messages;
        lock.unlock();
        if (messages != nullptr) {
            messages->leave();
        } else {
            core_->group.close();
        }
    }

    // What `run` raised, as torch knows it.
    std::exception_ptr attempt(const std::function<void()>& run, bool looks_for_signals) {
        std::exception_ptr raised;
        std::function<bool()> look = [&raised] { return (raised = raised_by_signal()) != nullptr; };
        Group::interrupted = looks_for_signals ? &look : nullptr;
        std::exception_ptr error;
        try {
            run();
        } catch (const Failure& failure) {
            error = raised != nullptr ? raised : as_torch_error(failure.what());
        } catch (const std::exception& other) {
            core_->group.abort(core_->group.called(getRank()) + " failed: " + other.what());
            error = std::current_exception();
        }
        Group::interrupted = nullptr;
        return error;
    }

    using Run = std::function<void(Collectives&, int64_t ns)>;

    template <typename Options>
    WorkPtr start(OpType type, const char* title, const Tensors& inputs, const Tensors& outputs, const Options& options,
                  Run run) {
        return start(type, title, inputs, outputs, options.timeout, is_async(options), std::move(run));
    }

    WorkPtr start(OpType type, const char* title, const Tensors& inputs, const Tensors& outputs, Milliseconds asked,
                  bool is_async, Run run) {
        ++num_started_;
        auto work = c10::make_intrusive<CCLWork>(getRank(), type, title, inputs, outputs);
        const Milliseconds timeout = asked == c10d::kUnsetTimeout ? Milliseconds(timeout_) : asked;
        const int64_t ns = std::chrono::nanoseconds(timeout).count();
        core_->runner.run(
            [this, work, run = std::move(run), ns, caller = std::this_thread::get_id()] {
                // a thread of ours gets no signals, and may outlive what looks for them
                const bool looks = std::this_thread::get_id() == caller;
                work->complete(attempt([&] { run(core_->collectives, ns); }, looks));
            },
            is_async || coalesces(work));
        return work;
    }

    bool coalesces(const WorkPtr& work) {
        const std::lock_guard lock(mutex_);
        if (is_coalescing_) coalesced_.push_back(work);
        return is_coalescing_;
    }

    WorkPtr message(Tensors& tensors, int peer, int tag, bool is_sent) {
        const char* const asked = is_sent ? "send" : "recv";
        const Flat data(only(tensors, asked));
        TORCH_CHECK_VALUE(peer >= 0 && peer < getSize() && peer != getRank(), "ccl: ", asked, " with rank ", peer,
                          " of a group of ", getSize(), " in its rank ", getRank(), "; give another rank of the group");
        const Tensors none;
        auto work = c10::make_intrusive<CCLWork>(getRank(), is_sent ? OpType::SEND : OpType::RECV,
                                                 is_sent ? "ccl:send" : "ccl:recv", is_sent ? tensors : none, tensors);
        const int64_t ns = std::chrono::nanoseconds(Milliseconds(timeout_)).count();
        ++num_started_;
        static_cast<void>(coalesces(work));
        std::unique_lock lock(mutex_);
        if (core_->messages == nullptr) core_->messages = std::make_shared<Messages>(core_->shared);
        const std::shared_ptr<Messages> messages = core_->messages;
        lock.unlock();
        work->set_poll([weak = std::weak_ptr<Messages>(messages)] {
            if (const std::shared_ptr<Messages> found = weak.lock()) found->poll();
        });
        messages->start({.is_sent = is_sent,
                         .peer = peer,
                         .tag = static_cast<uint32_t>(tag),
                         .data = data.data(),
                         .num_bytes = data.num_bytes(),
                         .limit_ns = ns,
                         .deadline = ds_cpu::comm::now_ns() + ns,
                         .done = [work, data, is_sent](const std::string* failure) {
                             if (failure == nullptr && !is_sent) data.give_back();
                             work->complete(failure == nullptr ? nullptr : as_torch_error(*failure));
                         }});
        return work;
    }

    // Types that are only moved count as bytes.
    static void move(Collectives& run, Kind kind, const std::vector<Part>& inputs, const std::vector<Part>& outputs,
                     const Tensor& like, int root, bool is_same, int64_t ns) {
        const Dtype dtype = dtype_of(like);
        const size_t numel = dtype == Dtype::kBytes ? like.nbytes() : like.numel();
        run.move(kind, inputs, outputs, dtype, root, is_same ? numel : 0, ns);
    }

    void check_count(const Tensors& tensors, const char* asked, const char* what) const {
        TORCH_CHECK_VALUE(tensors.size() == static_cast<size_t>(getSize()), "ccl: ", asked, " takes ", getSize(), " ",
                          what, ", one per rank, found ", tensors.size());
    }

    void check_sizes(const Tensors& larger, const Tensors& smaller, const char* asked) const {
        TORCH_CHECK_VALUE(larger.size() == smaller.size(), "ccl: ", asked, " found ", larger.size(), " and ",
                          smaller.size(), " tensors; give as many inputs as outputs");
        for (size_t index = 0; index < larger.size(); ++index) {
            TORCH_CHECK_VALUE(larger[index].numel() == smaller[index].numel() * getSize() &&
                                  larger[index].scalar_type() == smaller[index].scalar_type(),
                              "ccl: ", asked, " found ", larger[index].numel(), " elements of ",
                              larger[index].scalar_type(), " for ", getSize(), " ranks with ", smaller[index].numel(),
                              " of ", smaller[index].scalar_type(), "; give that of all ranks ", getSize(),
                              " times the size, of the same dtype");
        }
    }

    // Rows for each rank; no sizes: equal ones.
    std::vector<Part> split(const Flat& flat, const std::vector<int64_t>& sizes) const {
        if (sizes.empty()) {
            TORCH_CHECK_VALUE(flat.tensor().dim() > 0 && flat.tensor().size(0) % getSize() == 0,
                              "ccl: all_to_all cannot cut ", flat.tensor().sizes(), " for ", getSize(),
                              " ranks; give the sizes");
            return cut(flat.part(), getSize());
        }
        int64_t sum = 0;
        bool is_good = sizes.size() == static_cast<size_t>(getSize()) && flat.tensor().dim() > 0;
        for (const int64_t size : sizes) {
            sum += size;
            is_good &= size >= 0;
        }
        TORCH_CHECK_VALUE(is_good && sum == flat.tensor().size(0), "ccl: all_to_all found the sizes ", sizes,
                          " for a tensor of ", flat.tensor().sizes(), " and ", getSize(),
                          " ranks; give one size per rank, and their sum is the tensor's first one");
        const size_t row = sum == 0 ? 0 : flat.num_bytes() / static_cast<size_t>(sum);
        std::vector<Part> parts;
        char* data = flat.data();
        for (const int64_t size : sizes) {
            parts.push_back({data, row * static_cast<size_t>(size)});
            data += row * static_cast<size_t>(size);
        }
        return parts;
    }

    std::atomic<Milliseconds> timeout_;
    std::atomic<uint64_t> num_started_ = 0;
    const pid_t process_;
    std::mutex mutex_;  // guards the messages' start, and what is coalesced
    bool is_coalescing_ = false;
    std::vector<WorkPtr> coalesced_;
    std::unique_ptr<Core> core_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    pybind11::module_::import("torch.distributed");  // which knows the base class
    pybind11::class_<ProcessGroupCCL, c10d::Backend, c10::intrusive_ptr<ProcessGroupCCL>>(module, "ProcessGroupCCL")
        .def(pybind11::init([](int segment, int rank, int size, std::vector<int> ranks, int64_t timeout_ms,
                               const std::string& wish) {
                 return c10::make_intrusive<ProcessGroupCCL>(segment, rank, size, std::move(ranks),
                                                             Milliseconds(timeout_ms), wish);
             }),
             pybind11::call_guard<pybind11::gil_scoped_release>())
        .def("fail", &ProcessGroupCCL::fail)
        .def_property_readonly("num_started", &ProcessGroupCCL::getSequenceNumberForGroup)
        .def_property_readonly("transport", &ProcessGroupCCL::transport);
    module.def("segment_bytes", [](int size) { return Layout(size).num_bytes; });
    module.def("start_time", &ds_cpu::comm::start_time_of);
    module.attr("MAX_RANKS") = ds_cpu::comm::kMaxRanks;
}
