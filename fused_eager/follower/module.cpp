// The module: how Python connects it with the runtime's objects, and what it may ask.

#include "kernels.h"
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

void find_slots(const Names& names) {
  PyObject* type = names.of("HostBuffer");
  R.buffer = {{type, "array"}, {type, "born_native"}, {type, "cdata"}, {type, "epoch"}, {type, "error"},
              {type, "home"}, {type, "origin"}, {type, "previous"}, {type, "storage"}, {type, "stream"},
              {type, "vacant"}, {type, "vid"}};
  type = names.of("Stream");
  R.stream = {{type, "at"}, {type, "config"}, {type, "ended"}, {type, "epoch"}, {type, "guess"}, {type, "inputs"},
              {type, "natives"}, {type, "nodes"}, {type, "autotuner"}, {type, "pending"}, {type, "reads"}, {type, "backoff"},
              {type, "unfinished"}, {type, "vids"}, {type, "shadowed"}};
  type = names.of("Step");
  R.step = {{type, "call"}, {type, "compiled"}, {type, "depth"}, {type, "info"}, {type, "likely"}, {type, "node"},
            {type, "operands"}, {type, "then"}, {type, "vids"}, {type, "warm"}};
  type = names.of("Node");
  R.node = {{type, "place"}, {type, "results"}, {type, "scalars"}};
  type = names.of("Autotuner");
  R.autotuner = {{type, "countdown"}, {type, "native"}, {type, "stepping"}, {type, "waiting"}};
  type = names.of("DeviceInput");
  R.read = {{type, "array"}, {type, "buffer"}, {type, "home"}, {type, "origin"}, {type, "vid"}};
  R.native_vid = {names.of("NativeInput"), "vid"};
  type = names.of("Backoff");
  R.backoff = {{type, "due"}, {type, "left"}};
}

PyObject* connect(PyObject*, PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  const Names names{given};
  find_slots(names);
  R.front_door = reinterpret_cast<PyTypeObject*>(names.kept("FrontDoor"));
  R.place_type = reinterpret_cast<PyTypeObject*>(names.kept("Place"));
  R.buffer_type = reinterpret_cast<PyTypeObject*>(names.kept("HostBuffer"));
  R.device_input_type = reinterpret_cast<PyTypeObject*>(names.kept("DeviceInput"));
  R.table = names.kept("table");
  R.streams = names.kept("streams");
  R.deferred = names.kept("deferred");
  R.site = names.kept("site");
  R.acquire = names.kept("acquire");
  R.release = names.kept("release");
  R.native_input = names.kept("native_input");
  R.open_native = names.kept("open_native");
  R.must_stay = names.kept("must_stay");
  R.is_awaited = names.kept("is_awaited");
  R.passed_to_other_device = names.kept("passed_to_other_device");
  R.release_buffer = names.kept("release_buffer");
  R.with_scalars = names.kept("with_scalars");
  R.treatment_of = names.kept("treatment_of");
  R.settings_of = names.kept("settings_of");
  R.is_internal = names.kept("is_internal");
  R.count = names.kept("count");
  R.was_read = names.kept("was_read");
  R.read_again = names.kept("read_again");
  R.flags_at = number(names.of("flags_at"));
  R.unwritten = PyLong_AsVoidPtr(names.of("unwritten"));
  R.unwritten_least = number(names.of("unwritten_least"));
  R.unwritten_most = number(names.of("unwritten_most"));
  register_kernels();
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
