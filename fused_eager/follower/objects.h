// Python's objects as C++ sees them: owned references, slots read and written where they lie, and the lock.

#pragma once

#include <Python.h>
#include <structmember.h>

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/torch_dispatch_mode.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>

namespace fused_eager {

// A reference that is given up with its scope.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }

  static Ref borrowed(PyObject* object) {
    Py_XINCREF(object);
    return Ref(object);
  }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// The exception that Python has set, as one of C++ that becomes it again where Python is reached.
[[noreturn]] inline void raise() {
  python_error error;
  error.persist();
  throw error;
}

// What a call of Python's own interface returned, if it did not raise.
inline Ref checked(PyObject* owned) {
  if (owned == nullptr) raise();
  return Ref(owned);
}

inline void checked(int status) {
  if (status < 0) raise();
}

// A look into a dictionary; borrowed, and null where nothing is found.
inline PyObject* found(PyObject* dictionary, PyObject* key) {
  PyObject* value = PyDict_GetItemWithError(dictionary, key);
  if (value == nullptr && PyErr_Occurred()) raise();
  return value;
}

inline bool is_true(PyObject* object) {
  if (object == Py_True) return true;
  if (object == Py_False || object == Py_None) return false;
  const int answer = PyObject_IsTrue(object);
  checked(answer);
  return answer != 0;
}

inline bool equal(PyObject* a, PyObject* b) {
  if (a == b) return true;
  const int answer = PyObject_RichCompareBool(a, b, Py_EQ);
  checked(answer);
  return answer != 0;
}

inline Ref attribute(PyObject* of, const char* name) { return checked(PyObject_GetAttrString(of, name)); }

inline int64_t number(PyObject* object) {
  const auto value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) raise();
  return value;
}

inline double monotonic() {  // `time.monotonic`, and `time.perf_counter` on Linux
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A slot of a class with `__slots__`, at its place in the object.
class Slot {
 public:
  Slot() = default;
  Slot(PyObject* type, const char* name) {
    const Ref member = attribute(type, name);
    if (Py_TYPE(member.get()) != &PyMemberDescr_Type)
      throw std::runtime_error(std::string(name) + " is no slot");
    const auto* definition = reinterpret_cast<PyMemberDescrObject*>(member.get())->d_member;
    if (definition->type != T_OBJECT_EX) throw std::runtime_error(std::string(name) + " holds no object");
    at_ = definition->offset;
  }
  PyObject* of(PyObject* object) const { return *place(object); }  // borrowed
  void set(PyObject* object, PyObject* value) const {              // takes a reference of its own
    Py_INCREF(value);
    Py_XDECREF(std::exchange(*place(object), value));
  }
  void give(PyObject* object, Ref value) const { Py_XDECREF(std::exchange(*place(object), value.release())); }

 private:
  PyObject** place(PyObject* object) const {
    return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + at_);
  }
  Py_ssize_t at_ = 0;
};

// The interpreter's lock, which torch's bindings have let go of by the time an op arrives.
class Locked {
 public:
  Locked() : state_(PyGILState_Ensure()) {}
  ~Locked() { PyGILState_Release(state_); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  PyGILState_STATE state_;
};

// Below our mode, as torch's own way into Python leaves it: the mode is off its stack, and no key above it is on.
class Below {
 public:
  Below() : keys_(ABOVE) {}

 private:
  static constexpr auto ABOVE = c10::DispatchKeySet(c10::DispatchKeySet::FULL) ^
      (c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Python) |
       c10::DispatchKeySet(c10::DispatchKey::Python));
  c10::impl::ExcludeDispatchKeyGuard keys_;
  torch::torch_dispatch_mode::StashTorchDispatchModeGuard mode_;
};

}  // namespace fused_eager
