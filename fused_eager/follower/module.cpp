// The module: how Python connects it with the runtime's objects, and what it may ask.

#include "accelerator.h"
#include "reads.h"

namespace fused_eager {
namespace {

struct Names {  // the keyword arguments of `connect`
  PyObject* given;
  PyObject* of(const char* name) const {
    PyObject* value = PyDict_GetItemString(given, name);
    if (value == nullptr) throw std::runtime_error(std::string("connect: no ") + name);
    return value;
  }
  PyObject* kept(const char* name) const {
    PyObject* value = of(name);
    Py_INCREF(value);
    return value;
  }
};

PyObject* connect(PyObject*, PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  const Names names{given};
  find_shared(R, names);
  register_kernels();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* serve(PyObject*, PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  serve_accelerators(Names{given});
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* open(PyObject*, PyObject* whether) {
  R.open = whether == Py_True;
  Py_RETURN_NONE;
}

PyObject* ways(PyObject*, PyObject*) {
  return Py_BuildValue("LLL", (long long)taken[0], (long long)taken[1], (long long)taken[2]);
}

PyMethodDef METHODS[] = {
    {"connect", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(connect)), METH_VARARGS | METH_KEYWORDS,
     "Find the runtime's objects and register the kernels; once in a process."},
    {"serve", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(serve)), METH_VARARGS | METH_KEYWORDS,
     "Follow the ops of an accelerator's devices too; once in a process."},
    {"state_of", state_of, METH_O, "The state of a generator of an accelerator's; None for any other."},
    {"register_hooks", register_hooks, METH_O,
     "Answer what torch asks of an accelerator; once in a process, before anybody else does."},
    {"generator_over", generator_over, METH_VARARGS,
     "A generator of the accelerator's of a number, over the state that draws for it."},
    {"open", open, METH_O, "Whether ops are followed here from now on (True), or all go to Python."},
    {"ways", ways, METH_NOARGS, "How many ops of front doors went to Python, to ATen at once, and were followed."},
    {"reader", reader, METH_O, "A method that calls the one given, which reads a number, and notices that (reads.h)."},
    {"overlook", overlook, METH_O,
     "Till when reads of this thread are counted and no more, as perf_counter says; returns till when so far."},
    {"overlooked", overlooked, METH_NOARGS, "How many reads of this thread have been overlooked since this was asked."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, "fused_eager_follower", "See kernels.h.", -1, METHODS, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace fused_eager

extern "C" __attribute__((visibility("default"))) PyObject* PyInit_fused_eager_follower() {
  return PyModule_Create(&fused_eager::MODULE);
}
