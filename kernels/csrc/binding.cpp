#include "binding.h"

// Raise this when a function's arguments change meaning: kernels/_lib.py refuses a library of another version.
static constexpr long kVersion = 3;

PyMODINIT_FUNC PyInit__native() {
    static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, nullptr, nullptr,
                                     nullptr,               nullptr,   nullptr};
    PyObject* module = PyModule_Create(&definition);
    if (!module) return nullptr;
    bool fine = PyModule_AddIntConstant(module, "version", kVersion) == 0;
    for (grl::Binding* b = grl::Binding::first; fine && b; b = b->next)
        fine = PyModule_AddFunctions(module, b->methods) == 0;
    if (fine) return module;
    Py_DECREF(module);
    return nullptr;
}
