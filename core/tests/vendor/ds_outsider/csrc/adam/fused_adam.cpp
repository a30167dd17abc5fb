// A Python module of the C API, so that it compiles in a moment: multi_tensor_adam says whose it is.

#include <Python.h>

#include "xyz.h"

static PyObject* multi_tensor_adam(PyObject*, PyObject*) {
    return PyUnicode_FromString("multi_tensor_adam of " XYZ_VENDOR);
}

static PyMethodDef methods[] = {{"multi_tensor_adam", multi_tensor_adam, METH_NOARGS, ""},
                                {nullptr, nullptr, 0, nullptr}};

#define XYZ_TEXT(name) #name
#define XYZ_NAME(name) XYZ_TEXT(name)
#define XYZ_JOIN(name) PyInit_##name
#define XYZ_INIT(name) XYZ_JOIN(name)

PyMODINIT_FUNC XYZ_INIT(TORCH_EXTENSION_NAME)() {
    static PyModuleDef module = {PyModuleDef_HEAD_INIT, XYZ_NAME(TORCH_EXTENSION_NAME), nullptr, -1, methods};
    return PyModule_Create(&module);
}
