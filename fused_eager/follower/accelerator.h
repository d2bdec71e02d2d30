// Kernels of an accelerator's key, which spare the program the way into Python.
//
// Python has registered one for each op (frontends/device/kernels.py). Each that records gets another one in front of it
// here: the op that came next last time is followed, and any other goes on to Python's. A view is made by torch's own
// kernel for tensors without memory, as it is from Python.

#pragma once

#include "delegates.h"
#include "kernels.h"

#include <map>

namespace fused_eager {
namespace {

constexpr auto ACCELERATORS_KEY = c10::DispatchKey::PrivateUse1;

struct Accelerators {
  PyObject* expected = nullptr;  // storages whose values are on their way (devices/arrivals.py)
  std::vector<Memory> memories;  // by the number of the device,
  std::vector<PyObject*> streams;
};

Accelerators& accelerators() {  // never destroyed: it holds what is Python's
  static auto& found = *new Accelerators;
  return found;
}

bool is_on_accelerator(const IValue& a) { return is_defined(a) && a.toTensor().device().type() == c10::kPrivateUse1; }

// The number of the device of the first tensor on one; -1: there is none.
int64_t device_of_tensors(Arguments given) {
  for (const IValue& a : given) {
    if (is_on_accelerator(a)) return a.toTensor().device().index();
    if (!holds_tensors(a)) continue;
    for (const IValue& item : a.toListRef())
      if (is_on_accelerator(item)) return item.toTensor().device().index();
  }
  return -1;
}

// The number of the device whose op this is: that of its tensors, or else the one that is named; -1: none, or the two
// may differ, as in `torch.zeros_like(x, device="cpu")`.
int64_t device_of(Arguments given) {
  const int64_t found = device_of_tensors(given);
  for (const IValue& a : given) {
    if (!a.isDevice()) continue;
    const c10::Device named = a.toDevice();
    if (found < 0) return named.type() == c10::kPrivateUse1 ? named.index() : -1;
    const bool is_same = named.has_index() ? named.index() == found : accelerators().memories.size() == 1;
    if (named.type() != c10::kPrivateUse1 || !is_same) return -1;
  }
  return found;
}

struct AcceleratorKernel final : c10::OperatorKernel, Known {
  explicit AcceleratorKernel(c10::SafeKernelFunction python) : python_(std::move(python)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    Uncollected uncollected;
    Lesson lesson;
    int64_t device = -1;
    if (R.open) {
      const Locked locked;
      uncollected.begin();
      const size_t count = op.schema().arguments().size();
      const Arguments given(stack->data() + stack->size() - count, count);
      device = device_of(given);
      const bool is_known = device >= 0 && device < static_cast<int64_t>(accelerators().streams.size());
      const bool followed = is_known && decide(op, device, given, *stack, lesson);
      uncollected.end();
      if (followed) return;
    }
    python_.callBoxed(op, keys, stack);
    if (!lesson.stream) return;
    const Locked locked;
    learn(op, lesson, accelerators().memories[device].device);
  }

 private:
  bool decide(
      const c10::OperatorHandle& op, int64_t device, Arguments given, Stack& stack, Lesson& lesson) const {
    if (treatment == UNKNOWN) ask(op);
    if (treatment != COMPUTE || PyDict_GET_SIZE(accelerators().expected) != 0) return false;
    PyObject* stream = accelerators().streams[device];
    const Ref config = Ref::borrowed(R.stream.config.of(stream));
    const Settings settings = settings_of(config.get());
    if (!settings.follows) return false;
    for (const IValue& a : given)
      if (has_python_key(a)) return false;
    const Alone alone;
    if (R.stream.config.of(stream) != config.get() || R.stream.unfinished.of(stream) != Py_None) return false;
    if (may_begin_a_round(settings, stream)) return false;
    if (follow(settings, stream, given, stack, accelerators().memories[device])) {
      ++taken[static_cast<int>(Way::FOLLOWED)];
      return true;
    }
    ++taken[static_cast<int>(Way::PYTHON)];
    lesson.before = Ref::borrowed(R.stream.at.of(stream));
    lesson.arguments.assign(given.begin(), given.end());
    lesson.stream = Ref::borrowed(stream);
    return false;
  }

  // Whether a stream that is half full may end before this op, which Python finds out (`recording.rounds.comes_again`).
  bool may_begin_a_round(const Settings& settings, PyObject* stream) const {
    if (PyList_GET_SIZE(R.stream.nodes.of(stream)) < settings.max_pending / 2) return false;
    PyObject* first = R.stream.first.of(stream);
    return first == Py_None || R.step.info.of(first) == info;
  }

  c10::SafeKernelFunction python_;
};

struct ViewKernel final : c10::OperatorKernel {
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) const {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), stack);
  }
};

c10::OperatorHandle operator_named(PyObject* text) {
  const char* given = PyUnicode_AsUTF8(text);
  if (given == nullptr) raise();
  const std::string name = given;  // aten::add.Tensor
  const auto dot = name.find('.');
  const auto overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.substr(0, dot).c_str(), overload.c_str());
}

template <class Make>
void register_each(PyObject* names, Make make) {
  std::map<std::string, torch::Library*> libraries;  // by namespace; never destroyed
  const Ref items = checked(PySequence_Fast(names, "names of ops"));
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.get()); ++i) {
    PyObject* name = PySequence_Fast_GET_ITEM(items.get(), i);
    const auto op = operator_named(name);
    const std::string of(op.operator_name().getNamespace().value());
    auto& library = libraries[of];
    if (library == nullptr)
      library = new torch::Library(
          torch::Library::IMPL, of, std::make_optional(ACCELERATORS_KEY), __FILE__, __LINE__);
    library->impl(PyUnicode_AsUTF8(name), make(op));
  }
}

// Once in a process, where no op of the device is under way: see `register_kernels`.
template <class Names>
void serve_accelerators(const Names& names) {
  auto* const type = reinterpret_cast<PyTypeObject*>(names.kept("buffer_type"));
  R.of_device = Slot(reinterpret_cast<PyObject*>(type), "device");
  R.of_table = Slot(reinterpret_cast<PyObject*>(type), "table");
  auto& all = accelerators();
  all.expected = names.kept("expected");
  const Ref devices = checked(PySequence_Fast(names.of("devices"), "streams, tables and devices"));
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(devices.get()); ++i) {
    PyObject* row = PySequence_Fast_GET_ITEM(devices.get(), i);
    const auto kept = [row](Py_ssize_t k) { return Ref::borrowed(PyTuple_GetItem(row, k)).release(); };
    const c10::Device device(c10::kPrivateUse1, static_cast<c10::DeviceIndex>(i));
    all.streams.push_back(kept(0));
    all.memories.push_back({device, kept(1), type, kept(2)});
  }
  register_delegates(names.kept("make_event"), names.kept("make_generator"));
  register_each(names.of("recorded"), [](const c10::OperatorHandle& op) {
    auto python = op.getComputedKernelForDispatchKey(ACCELERATORS_KEY);
    return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<AcceleratorKernel>(std::move(python)));
  });
  register_each(names.of("views"), [](const c10::OperatorHandle&) {
    return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<ViewKernel>());
  });
}

}  // namespace
}  // namespace fused_eager
