// Reads: what takes the place of `Tensor.item` and its like while a context is open, and notices that a number is read.
//
// Where torch runs alone, reads are counted and no more for a millisecond at a time (`frontends/context/bypass.py`), and a loop of
// little but reads feels what that takes: 0.35 us each in Python, a sixth of that here.

#pragma once

#include <vector>

#include "runtime.h"

namespace fused_eager {
namespace {

// Of each thread: till when its reads are counted and no more, by the clock of `time.perf_counter`, and how many were.
thread_local double overlooks_until = 0;
thread_local int64_t overlooked_reads = 0;

struct Reader {  // a method: what it takes goes on to the original as it is
  PyObject_HEAD
  vectorcallfunc call;
  PyObject *original, *attributes;
};

// Where torch lets no mode see the read, the trap refuses it: Python finishes the value, and reads again.
PyObject* read_again(PyObject* original, PyObject* const* arguments, size_t count) {
  if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return nullptr;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  const Ref held_type(type), error(value), held_trace(trace);
  if (trace != nullptr) PyException_SetTraceback(value, trace);
  std::vector<PyObject*> given{value, original};
  given.insert(given.end(), arguments, arguments + PyVectorcall_NARGS(count));
  return PyObject_Vectorcall(R.read_again, given.data(), given.size(), nullptr);
}

PyObject* read(PyObject* self, PyObject* const* arguments, size_t count, PyObject* names) {
  PyObject* const original = reinterpret_cast<Reader*>(self)->original;
  Ref number(PyObject_Vectorcall(original, arguments, count, names));
  if (!number) number = Ref(read_again(original, arguments, count));
  if (!number) return nullptr;
  if (overlooks_until > 0 && monotonic() < overlooks_until) {
    ++overlooked_reads;
    return number.release();
  }
  const Ref told(PyObject_CallNoArgs(R.was_read));
  return told ? number.release() : nullptr;
}

PyObject* bound(PyObject* self, PyObject* object, PyObject*) {
  return object == nullptr ? Ref::borrowed(self).release() : PyMethod_New(self, object);
}

void forget_reader(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Py_XDECREF(reinterpret_cast<Reader*>(self)->original);
  Py_XDECREF(reinterpret_cast<Reader*>(self)->attributes);
  type->tp_free(self);
  Py_DECREF(type);
}

// Equal to the original, as torch and its users keep functions in tables.
Py_hash_t hash_of(PyObject* self) { return PyObject_Hash(reinterpret_cast<Reader*>(self)->original); }

PyObject* compared(PyObject* self, PyObject* other, int how) {
  if (Py_TYPE(other) == Py_TYPE(self)) other = reinterpret_cast<Reader*>(other)->original;
  return PyObject_RichCompare(reinterpret_cast<Reader*>(self)->original, other, how);
}

PyTypeObject* reader_type() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(Reader, call), READONLY, nullptr},
      {"__dictoffset__", T_PYSSIZET, offsetof(Reader, attributes), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static PyGetSetDef properties[] = {
      {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyType_Slot slots[] = {
      {Py_tp_members, members},
      {Py_tp_getset, properties},
      {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
      {Py_tp_descr_get, reinterpret_cast<void*>(bound)},
      {Py_tp_hash, reinterpret_cast<void*>(hash_of)},
      {Py_tp_richcompare, reinterpret_cast<void*>(compared)},
      {Py_tp_dealloc, reinterpret_cast<void*>(forget_reader)},
      {0, nullptr}};
  static PyType_Spec spec = {
      "fused_eager_follower.Reader", sizeof(Reader), 0,
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR, slots};
  static auto* const type = reinterpret_cast<PyTypeObject*>(checked(PyType_FromSpec(&spec)).release());
  return type;
}

PyObject* reader(PyObject*, PyObject* original) {
  HANDLE_TH_ERRORS
  Ref made = checked(reader_type()->tp_alloc(reader_type(), 0));
  auto* self = reinterpret_cast<Reader*>(made.get());
  self->call = read;
  self->original = Ref::borrowed(original).release();
  return made.release();
  END_HANDLE_TH_ERRORS
}

PyObject* overlook(PyObject*, PyObject* until) {
  const double given = PyFloat_AsDouble(until);
  if (given == -1 && PyErr_Occurred()) return nullptr;
  return PyFloat_FromDouble(std::exchange(overlooks_until, given));
}

PyObject* overlooked(PyObject*, PyObject*) { return PyLong_FromLongLong(std::exchange(overlooked_reads, 0)); }

}  // namespace
}  // namespace fused_eager
