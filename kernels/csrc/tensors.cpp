// What a kernel must know of torch's tensors before it may read them as they are. Asking each for its dtype, shape,
// device and strides from Python takes longer than a small kernel does. DLPack's exchange table, which torch.Tensor
// carries as a capsule, answers at the cost of a C call and needs no header of torch.
#include <cstring>

#include "binding.h"

namespace {

// The binary layout of DLPack 1, https://dmlc.github.io/dlpack/latest/c_api.html.
struct View {
    void* data;
    int32_t device, device_index, dims;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

struct ExchangeTable {
    uint32_t major, minor;
    void* older;
    void *allocate, *share, *adopt;
    int (*borrow)(void* object, View* view);  // may be null
    void* stream;
};

constexpr int32_t kCpu = 1;
constexpr uint8_t kFloat = 2, kBool = 6;

struct Tensors {
    PyObject* type = nullptr;    // torch.Tensor, kept alive
    PyObject* is_neg = nullptr;  // its method, likewise
    const ExchangeTable* table = nullptr;

    Tensors() {
        PyObject* torch = PyImport_ImportModule("torch");
        type = torch ? PyObject_GetAttrString(torch, "Tensor") : nullptr;
        PyObject* capsule = type ? PyObject_GetAttrString(type, "__dlpack_c_exchange_api__") : nullptr;
        if (capsule) table = static_cast<ExchangeTable*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
        is_neg = type ? PyObject_GetAttrString(type, "is_neg") : nullptr;
        if (table && (table->major != 1 || !table->borrow || !is_neg)) table = nullptr;
        Py_XDECREF(capsule);
        Py_XDECREF(torch);
        PyErr_Clear();
    }

    // True for a tensor, no subclass, on the CPU, whose numbers are those that stand in its memory. Not so for zeros
    // that take none, for the wrappers of functionalisation and torch.func, and for a view that is still to be negated.
    bool borrow(PyObject* object, View& v) const {
        if (!table || reinterpret_cast<PyObject*>(Py_TYPE(object)) != type) return false;
        if (table->borrow(object, &v)) {  // of a layout or dtype that DLPack lacks
            PyErr_Clear();
            return false;
        }
        if (v.device != kCpu) return false;
        if (!v.data)
            for (int32_t i = 0;; ++i)
                if (i == v.dims) return false;
                else if (v.shape[i] == 0) return true;
        if (v.code == kBool) return true;
        PyObject* negated = PyObject_CallFunctionObjArgs(is_neg, object, nullptr);
        Py_XDECREF(negated);
        if (!negated) PyErr_Clear();
        return negated == Py_False;
    }
};

const Tensors& torch_tensors() {
    static const Tensors found;
    return found;
}

bool contiguous(const View& v) {
    int64_t expected = 1;
    for (int32_t i = v.dims; i--; expected *= v.shape[i])
        if (v.shape[i] != 1 && v.strides[i] != expected) return false;
    return true;
}

bool same_shape(const View& a, const View& b) {
    return a.dims == b.dims && (a.dims == 0 || !std::memcmp(a.shape, b.shape, sizeof(int64_t) * size_t(a.dims)));
}

// trajectories(*tensors, floats, time_dim): (itemsize, outer, steps, inner) when all are contiguous tensors of one shape
// on the CPU, no subclasses and not empty, the first `floats` of them all float32 or all float64, the others bool, and
// time_dim one of their dimensions (None: the one before a trailing 1, else the last). Else None, as always with a
// torch that lacks the table.
PyObject* trajectories(PyObject*, PyObject* const* args, Py_ssize_t count) {
    const Tensors& tensors = torch_tensors();
    int64_t floats, time_dim = 0;
    if (count < 3) return PyErr_Format(PyExc_TypeError, "%zd arguments, expected at least 3", count);
    const bool given = args[count - 1] != Py_None;
    if (!grl::read(args[count - 2], floats)) return nullptr;
    if (given && !grl::read(args[count - 1], time_dim)) {  // the caller says what is wrong with it
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    View first{}, view{};
    for (Py_ssize_t i = 0; i < count - 2; ++i) {
        View& v = i ? view : first;
        if (!tensors.borrow(args[i], v)) Py_RETURN_NONE;
        const bool dtype = i < floats ? v.code == kFloat && (v.bits == 32 || v.bits == 64) && v.bits == first.bits
                                      : v.code == kBool;
        if (!dtype || !contiguous(v) || !same_shape(v, first)) Py_RETURN_NONE;
    }
    if (!given) time_dim = first.dims >= 2 && first.shape[first.dims - 1] == 1 ? -2 : -1;
    if (time_dim < 0) time_dim += first.dims;
    if (time_dim < 0 || time_dim >= first.dims) Py_RETURN_NONE;
    const int64_t steps = first.shape[time_dim];
    int64_t outer = 1, inner = 1;
    for (int64_t i = 0; i < time_dim; ++i) outer *= first.shape[i];
    for (int64_t i = time_dim + 1; i < first.dims; ++i) inner *= first.shape[i];
    if (outer * steps * inner == 0) Py_RETURN_NONE;
    return Py_BuildValue("iLLL", first.bits / 8, (long long)outer, (long long)steps, (long long)inner);
}

// ordinary(*arguments): whether the tensors among them are on the CPU and may be read as they are, strides and all. Always
// false with a torch that lacks the table: its dispatcher knows what to do.
PyObject* ordinary(PyObject*, PyObject* const* args, Py_ssize_t count) {
    const Tensors& tensors = torch_tensors();
    View view{};
    for (Py_ssize_t i = 0; i < count; ++i) {
        const int is_tensor = tensors.type ? PyObject_IsInstance(args[i], tensors.type) : 1;
        if (is_tensor < 0) return nullptr;
        if (is_tensor && !tensors.borrow(args[i], view)) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

grl::Binding trajectories_binding("trajectories", trajectories), ordinary_binding("ordinary", ordinary);

}  // namespace
