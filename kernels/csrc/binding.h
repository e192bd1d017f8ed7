// Kernels as functions of a Python module, converted by their C++ signatures: GRL_PYTHON(grl_gae_f32) beside the
// definition is all that a new one needs. Called from Python, a pointer is an int above 0 or None; the result is an int, or None
// for void. ctypes takes a microsecond to convert fifteen arguments; this takes a tenth of one.
#pragma once
#define Py_LIMITED_API 0x030a0000
#include <Python.h>

#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

namespace grl {

using FastCall = PyObject* (*)(PyObject* module, PyObject* const* args, Py_ssize_t count);

// One function of the module. Static initialisers link these into a list, which PyInit__native in binding.cpp walks.
struct Binding {
    static inline Binding* first = nullptr;
    PyMethodDef methods[2];
    Binding* next;

    Binding(const char* name, FastCall call)
        : methods{{name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call)), METH_FASTCALL, nullptr}, {}},
          next(first) {
        first = this;
    }
};

inline bool read(PyObject* object, int64_t& x) {
    x = PyLong_AsLongLong(object);
    return x != -1 || !PyErr_Occurred();
}

inline bool read(PyObject* object, double& x) {
    x = PyFloat_AsDouble(object);
    return x != -1.0 || !PyErr_Occurred();
}

// A tensor whose memory was given back, or that never had any, has the address zero: None is the pointer to nothing.
template <class T>
bool read(PyObject* object, T*& x) {
    x = object == Py_None ? nullptr : static_cast<T*>(PyLong_AsVoidPtr(object));
    if (x || object == Py_None) return true;
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a tensor has no memory: was its storage resized to 0?");
    return false;
}

template <auto F>
struct Call;

template <class Result, class... Args, Result (*F)(Args...)>
struct Call<F> {
    static PyObject* run(PyObject*, PyObject* const* args, Py_ssize_t count) {
        if (count != Py_ssize_t(sizeof...(Args)))
            return PyErr_Format(PyExc_TypeError, "%zd arguments, expected %zd", count, Py_ssize_t(sizeof...(Args)));
        return convert(args, std::index_sequence_for<Args...>());
    }

    template <size_t... I>
    static PyObject* convert(PyObject* const* args, std::index_sequence<I...>) {
        std::tuple<Args...> x;
        if (!(read(args[I], std::get<I>(x)) && ...)) return nullptr;
        PyThreadState* const state = PyEval_SaveThread();
        if constexpr (std::is_void_v<Result>) {
            F(std::get<I>(x)...);
            PyEval_RestoreThread(state);
            Py_RETURN_NONE;
        } else {
            const int64_t result = F(std::get<I>(x)...);
            PyEval_RestoreThread(state);
            return PyLong_FromLongLong(result);
        }
    }
};

}  // namespace grl

#define GRL_PYTHON(f) static grl::Binding grl_python_##f(#f, grl::Call<f>::run);
