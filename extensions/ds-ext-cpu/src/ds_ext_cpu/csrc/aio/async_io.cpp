// The Python module: an engine and its operations as capsules, for ds_ext_cpu/aio/handle.py, which checks arguments.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "aio/engine.h"

namespace {

using ds_cpu::aio::Engine;
using ds_cpu::aio::Operation;
using ds_cpu::aio::Options;
using ds_cpu::aio::Request;

constexpr char kEngine[] = "ds_cpu.aio.Engine";
constexpr char kOperation[] = "ds_cpu.aio.Operation";

// In a child of the process that made it an engine has no threads: it is left as it is.
struct Owned {
    std::unique_ptr<Engine> engine;
    pid_t pid = getpid();
    ~Owned() {
        if (getpid() != pid) static_cast<void>(engine.release());
    }
};

Owned* owned_from(PyObject* capsule) { return static_cast<Owned*>(PyCapsule_GetPointer(capsule, kEngine)); }

std::shared_ptr<Operation>* operation_from(PyObject* capsule) {
    return static_cast<std::shared_ptr<Operation>*>(PyCapsule_GetPointer(capsule, kOperation));
}

PyObject* raise(int error, const char* what) {
    PyObject* arguments = Py_BuildValue("(is)", error, what);
    if (arguments != nullptr) PyErr_SetObject(PyExc_OSError, arguments);
    Py_XDECREF(arguments);
    return nullptr;
}

void destroy_engine(PyObject* capsule) {
    Owned* owned = owned_from(capsule);
    PyThreadState* state = PyEval_SaveThread();  // it waits for what is in flight
    delete owned;
    PyEval_RestoreThread(state);
}

void destroy_operation(PyObject* capsule) { delete operation_from(capsule); }

PyObject* start(PyObject*, PyObject* arguments) {
    int io_uring, single_submit, overlap_events;
    long long block_size;
    unsigned queue_depth, num_workers;
    if (!PyArg_ParseTuple(arguments, "pLIppI", &io_uring, &block_size, &queue_depth, &single_submit, &overlap_events,
                          &num_workers)) {
        return nullptr;
    }
    auto owned = std::make_unique<Owned>();
    owned->engine = std::make_unique<Engine>(
        Options{io_uring != 0, block_size, queue_depth, single_submit != 0, overlap_events != 0, num_workers});
    if (const int error = owned->engine->start()) return raise(error, std::strerror(error));
    PyObject* capsule = PyCapsule_New(owned.get(), kEngine, destroy_engine);
    if (capsule != nullptr) owned.release();
    return capsule;
}

PyObject* submit(PyObject*, PyObject* arguments) {
    PyObject *engine, *held, *buffer;
    int write, direct_fd, plain_fd, one_worker;
    unsigned long long address;
    long long length, offset, memory_align, file_align;
    if (!PyArg_ParseTuple(arguments, "OO!OpiiKLLLLp", &engine, &PyDict_Type, &held, &buffer, &write, &direct_fd,
                          &plain_fd, &address, &length, &offset, &memory_align, &file_align, &one_worker)) {
        return nullptr;
    }
    Owned* owned = owned_from(engine);
    if (owned == nullptr) return nullptr;
    const Request request{write != 0,   direct_fd,  plain_fd,       reinterpret_cast<char*>(address), length, offset,
                          memory_align, file_align, one_worker != 0};
    auto operation = std::make_unique<std::shared_ptr<Operation>>();
    PyObject* capsule = PyCapsule_New(operation.get(), kOperation, destroy_operation);
    if (capsule == nullptr) return nullptr;
    std::shared_ptr<Operation>& submitted = *operation.release();
    // The buffer is held before its operation begins, and no signal handler of Python runs in between.
    if (PyDict_SetItem(held, capsule, buffer) == 0) {
        submitted = owned->engine->submit(request);
        if (submitted != nullptr) return capsule;
        PyErr_SetString(PyExc_RuntimeError, "the engine is stopped");
    }
    Py_DECREF(capsule);
    return nullptr;
}

PyObject* wait(PyObject*, PyObject* arguments) {
    PyObject *engine, *capsule;
    double timeout_s;
    if (!PyArg_ParseTuple(arguments, "OOd", &engine, &capsule, &timeout_s)) return nullptr;
    Owned* owned = owned_from(engine);
    auto* operation = owned == nullptr ? nullptr : operation_from(capsule);
    if (operation == nullptr) return nullptr;
    bool done;
    Py_BEGIN_ALLOW_THREADS;
    done = owned->engine->wait(**operation, timeout_s);
    Py_END_ALLOW_THREADS;
    if (!done) Py_RETURN_NONE;
    return Py_BuildValue("(iLL)", (*operation)->error, static_cast<long long>((*operation)->error_offset),
                         static_cast<long long>((*operation)->error_length));
}

PyObject* stop(PyObject*, PyObject* capsule) {
    Owned* owned = owned_from(capsule);
    if (owned == nullptr) return nullptr;
    Py_BEGIN_ALLOW_THREADS;
    owned->engine->stop();
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

PyObject* reserve(PyObject*, PyObject* arguments) {
    int fd;
    long long offset, length;
    if (!PyArg_ParseTuple(arguments, "iLL", &fd, &offset, &length)) return nullptr;
    int error;
    Py_BEGIN_ALLOW_THREADS;
    do {
        error = fallocate(fd, 0, off_t(offset), off_t(length)) == 0 ? 0 : errno;
    } while (error == EINTR);
    Py_END_ALLOW_THREADS;
    return PyLong_FromLong(error);
}

PyObject* alignment(PyObject*, PyObject* descriptor) {
    const long fd = PyLong_AsLong(descriptor);
    if (fd == -1 && PyErr_Occurred() != nullptr) return nullptr;
    struct statx found;
    std::memset(&found, 0, sizeof found);
    unsigned memory = 0, file = 0;
#ifdef STATX_DIOALIGN
    if (statx(int(fd), "", AT_EMPTY_PATH, STATX_DIOALIGN, &found) == 0 && (found.stx_mask & STATX_DIOALIGN) != 0) {
        memory = found.stx_dio_mem_align;
        file = found.stx_dio_offset_align;
    }
#endif
    return Py_BuildValue("(II)", memory, file);
}

PyMethodDef methods[] = {
    {"start", start, METH_VARARGS,
     "start(io_uring, block_size, queue_depth, single_submit, overlap_events, num_workers) -> engine; raises OSError"},
    {"submit", submit, METH_VARARGS,
     "submit(engine, held, buffer, write, direct_fd, plain_fd, address, length, offset, memory_align, file_align, "
     "one_worker) -> operation, which closes both descriptors (-1: none) when it is done; held[operation] is buffer"},
    {"wait", wait, METH_VARARGS,
     "wait(engine, operation, timeout_s) -> None, or (errno, offset, length) of the first error, errno 0: none"},
    {"stop", stop, METH_O, "stop(engine): carry out what was submitted and end the threads"},
    {"reserve", reserve, METH_VARARGS, "reserve(fd, offset, length) -> errno of fallocate, 0: done"},
    {"alignment", alignment, METH_O,
     "alignment(fd) -> (of memory, of offsets) in bytes that O_DIRECT needs; 0: unknown"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "async_io", "Asynchronous file I/O.", -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

#define DS_NAME_(prefix, name) prefix##name
#define DS_NAME(prefix, name) DS_NAME_(prefix, name)

PyMODINIT_FUNC DS_NAME(PyInit_, TORCH_EXTENSION_NAME)() { return PyModule_Create(&definition); }
