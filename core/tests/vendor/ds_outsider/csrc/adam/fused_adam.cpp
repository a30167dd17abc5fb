// DeepSpeed's fused_adam as a Python module of the C API, so that it compiles in a moment: fp32, host memory.

#include <Python.h>

#include <cmath>

#include "xyz.h"

static long calls = 0;

// What `tensor.name()` returns, as a number.
static long long ask(PyObject* tensor, const char* name) {
    PyObject* answer = PyObject_CallMethod(tensor, name, nullptr);
    long long number = answer ? PyLong_AsLongLong(answer) : 0;
    Py_XDECREF(answer);
    return number;
}

static float* data(PyObject* lists, Py_ssize_t list, Py_ssize_t index) {
    return reinterpret_cast<float*>(ask(PyList_GetItem(PyList_GetItem(lists, list), index), "data_ptr"));
}

static PyObject* multi_tensor_adam(PyObject*, PyObject* args) {
    int chunk_size, step, mode, bias_correction;
    PyObject *noop_flag, *lists;
    double lr, beta1, beta2, eps, weight_decay;
    if (!PyArg_ParseTuple(args, "iOO!ddddiiid", &chunk_size, &noop_flag, &PyList_Type, &lists, &lr, &beta1, &beta2,
                          &eps, &step, &mode, &bias_correction, &weight_decay))
        return nullptr;
    const double c1 = bias_correction ? 1 - std::pow(beta1, step) : 1;
    const double c2 = bias_correction ? 1 - std::pow(beta2, step) : 1;
    PyObject* params = PyList_GetItem(lists, 1);
    for (Py_ssize_t index = 0; index < PyList_Size(params); ++index) {
        float *g = data(lists, 0, index), *p = data(lists, 1, index);
        float *m = data(lists, 2, index), *v = data(lists, 3, index);
        const long long numel = ask(PyList_GetItem(params, index), "numel");
        for (long long i = 0; i < numel; ++i) {
            const double grad = mode == 1 ? g[i] : g[i] + weight_decay * p[i];
            m[i] = beta1 * m[i] + (1 - beta1) * grad;
            v[i] = beta2 * v[i] + (1 - beta2) * grad * grad;
            const double update = m[i] / c1 / (std::sqrt(v[i] / c2) + eps);
            p[i] -= lr * (mode == 1 ? update + weight_decay * p[i] : update);
        }
    }
    ++calls;
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
}

static PyObject* whose(PyObject*, PyObject*) { return PyUnicode_FromString("fused_adam of " XYZ_VENDOR); }

static PyObject* num_calls(PyObject*, PyObject*) { return PyLong_FromLong(calls); }

static PyMethodDef methods[] = {{"multi_tensor_adam", multi_tensor_adam, METH_VARARGS, ""},
                                {"whose", whose, METH_NOARGS, ""},
                                {"num_calls", num_calls, METH_NOARGS, ""},
                                {nullptr, nullptr, 0, nullptr}};

#define XYZ_TEXT(name) #name
#define XYZ_NAME(name) XYZ_TEXT(name)
#define XYZ_JOIN(name) PyInit_##name
#define XYZ_INIT(name) XYZ_JOIN(name)

PyMODINIT_FUNC XYZ_INIT(TORCH_EXTENSION_NAME)() {
    static PyModuleDef module = {PyModuleDef_HEAD_INIT, XYZ_NAME(TORCH_EXTENSION_NAME), nullptr, -1, methods};
    return PyModule_Create(&module);
}
