// Kernels of torch's key for Python, which spare the program the way into Python.
//
// Below autograd, where torch would enter `__torch_dispatch__`, each op of the namespace `aten` comes here first. If
// our front door is the only mode of the thread, then a view goes on to ATen, as does what runs natively while nothing
// is pending, and the op that came next last time is followed. Anything else, and everything where other modes or none
// are on the stack, takes torch's way into Python as it would without these kernels.

#pragma once

#include "follow.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/library.h>

#include <unordered_map>

namespace fused_eager {
namespace {

Settings settings_of(PyObject* config) {
  // Of each configuration that is in use: threads take turns at theirs. Never destroyed: it holds what is Python's.
  static auto& known = *new std::unordered_map<PyObject*, std::pair<Ref, Settings>>;
  const auto found = known.find(config);
  if (found != known.end()) return found->second.second;
  if (known.size() >= 64) known.clear();
  const Settings made = settings_from(checked(PyObject_CallOneArg(R.settings_of, config)).get());
  known.emplace(config, std::make_pair(Ref::borrowed(config), made));
  return made;
}

// The runtime's lock. Whoever had to wait for it finds that other threads have run meanwhile.
class Alone {
 public:
  Alone() : waited_(!is_true(checked(PyObject_CallOneArg(R.acquire, Py_False)).get())) {
    if (waited_) checked(PyObject_CallNoArgs(R.acquire));
  }
  ~Alone() { Py_XDECREF(PyObject_CallNoArgs(R.release)); }
  Alone(const Alone&) = delete;
  Alone& operator=(const Alone&) = delete;
  bool waited() const { return waited_; }

 private:
  bool waited_;
};

const c10::SafeKernelFunction* into_python = nullptr;  // torch's own kernel, which is a fallback for all ops
const char* const CAPSULE = "fused_eager.compiled.step";

void forget_step(PyObject* capsule) {
  delete static_cast<CompiledStep*>(PyCapsule_GetPointer(capsule, CAPSULE));
}

CompiledStep* compiled(PyObject* step) {
  PyObject* found = R.step.compiled.of(step);
  return PyCapsule_CheckExact(found) ? static_cast<CompiledStep*>(PyCapsule_GetPointer(found, CAPSULE)) : nullptr;
}

PyObject* expected_of(PyObject* stream) {  // `Stream.expected`
  PyObject* at = R.stream.at.of(stream);
  return number(R.step.depth.of(at)) != 0 ? R.step.likely.of(at) : R.stream.guess.of(stream);
}

bool has_python_key(const IValue& a) {
  if (a.isTensor()) return a.toTensor().defined() && a.toTensor().key_set().has(c10::DispatchKey::Python);
  if (!holds_tensors(a)) return false;
  for (const IValue& item : a.toListRef())
    if (has_python_key(item)) return true;
  return false;
}

Ref launches() {
  static PyObject* const name = name_of("launches");
  return checked(PyObject_GetAttr(R.deferred, name));
}

bool nothing_is_pending() { return PyDict_GET_SIZE(R.table) == 0 && !is_true(launches().get()); }

bool is_being_read(PyObject* address) {  // `DeferredChecks.is_reading`
  static PyObject* const reading = name_of("reading");
  const Ref all = launches(), each = checked(PyObject_GetIter(all.get()));
  while (const Ref launch = Ref(PyIter_Next(each.get())))
    if (found(checked(PyObject_GetAttr(launch.get(), reading)).get(), address) != nullptr) return true;
  if (PyErr_Occurred()) raise();
  return false;
}

bool is_awaited(PyObject* address) { return is_true(checked(PyObject_CallOneArg(R.is_awaited, address)).get()); }

// Whether a tensor is one finished number in native memory.
bool is_finished_number(const at::Tensor& t) {
  if (!is_tensor_we_know(t, c10::kCPU) || t.numel() > 1 || t.is_complex()) return false;
  if (!at::isFloatingType(t.scalar_type()) && !at::isIntegralType(t.scalar_type(), true)) return false;
  return found(R.table, checked(address_of(t.storage().unsafeGetStorageImpl())).get()) == nullptr;
}

enum class Way { PYTHON, NATIVE, FOLLOWED };
int64_t taken[3] = {0, 0, 0};  // how often each way was gone, by the ops of our front doors

const Memory& host() {
  static const Memory memory{c10::kCPU, R.table, R.buffer_type};
  return memory;
}

// What a call leaves behind that goes to Python and may be learned from.
struct Lesson {
  Ref stream, before;  // where the stream was
  Stack arguments;

  ~Lesson() {
    if (!stream) return;
    const Locked locked;
    stream = Ref();
    before = Ref();
  }
};

// Holds the collector off from where it begins until it ends: a finalizer of the program's may call torch, and would find
// no mode that sees it, or what is followed half done.
class Uncollected {
 public:
  void begin() { held_ = PyGC_Disable() != 0; }
  void end() {
    if (std::exchange(held_, false)) PyGC_Enable();
  }
  Uncollected() = default;
  ~Uncollected() {
    if (!held_) return;
    const Locked locked;
    end();
  }
  Uncollected(const Uncollected&) = delete;
  Uncollected& operator=(const Uncollected&) = delete;

 private:
  bool held_ = false;
};

// From Python 3.12 on a collection that is due is run by the interpreter when it looks up next: held off by then, and in
// the middle of an op. Finalizers, and handlers of signals, find what they would between two ops, autograd as well.
void collect_if_due() {
#if PY_VERSION_HEX >= 0x030C0000
  auto keys = c10::impl::tls_local_dispatch_key_set();
  if (!c10::InferenceMode::is_enabled())
    keys.excluded_ = keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  const c10::impl::ForceDispatchKeyGuard outside(keys);
  checked(PyErr_CheckSignals());
#endif
}

// Adds the time of an op to what its front door is told to measure (`compiling.measuring`), unless Python does so.
class Timed {
 public:
  explicit Timed(PyObject* door) : began_(std::chrono::steady_clock::now()) {
    if (Py_TYPE(door) != R.front_door) timing_ = attribute(door, "timing");
  }
  void ends() const {
    if (!timing_ || is_true(attribute(timing_.get(), "inside").get())) return;
    const std::chrono::duration<double> here = std::chrono::steady_clock::now() - began_;
    const Ref before = attribute(timing_.get(), "spent");
    const Ref after = checked(PyFloat_FromDouble(PyFloat_AsDouble(before.get()) + here.count()));
    checked(PyObject_SetAttrString(timing_.get(), "spent", after.get()));
  }

 private:
  std::chrono::steady_clock::time_point began_;
  Ref timing_;
};

// What is known of an op, and what its calls were when they came last.
struct Known {
  mutable PyObject* info = nullptr;  // the `OpInfo` of its op; never given up, for kernels outlive the interpreter
  mutable int64_t treatment = UNKNOWN;
  mutable bool writes_list = false, is_in_place = false;  // the latter: of its first argument, and of nothing else

  bool follow(const Settings& settings, PyObject* stream, Arguments given, Stack& stack, const Memory& memory) const {
    PyObject* step = expected_of(stream);
    if (step == Py_None || R.step.info.of(step) != info || R.stream.shadowed.of(stream) != Py_None) return false;
    const bool begins = PyList_GET_SIZE(R.stream.nodes.of(stream)) == 0;  // on the host it may be run at once instead
    if (begins && memory.accelerator == nullptr && !is_true(R.step.warm.of(step))) return false;
    CompiledStep* known = compiled(step);
    if (known == nullptr || (known->is_island && !settings.allows_islands) ||
        known->default_dtype != c10::typeMetaToScalarType(c10::get_default_dtype()) ||
        PyList_GET_SIZE(R.stream.nodes.of(stream)) + 1 >= settings.max_pending)
      return false;
    // Another thread may forget the step, or learn it anew, while Python is asked something.
    const Ref kept = Ref::borrowed(step), made = Ref::borrowed(R.step.compiled.of(step));
    Follower follower(*known, step, stream, memory);
    return follower.compare(given) && follower.record(stack);
  }

  void ask(const c10::OperatorHandle& op) const {
    const auto& name = op.operator_name();
    const Ref answer =
        checked(PyObject_CallFunction(R.treatment_of, "ss", name.name.c_str(), name.overload_name.c_str()));
    info = Ref::borrowed(PyTuple_GetItem(answer.get(), 0)).release();
    writes_list = is_true(PyTuple_GetItem(answer.get(), 1));
    treatment = number(PyTuple_GetItem(answer.get(), 2));
    const auto& schema = op.schema();
    is_in_place = schema.arguments().size() > 1 && schema.returns().size() == 1;
    for (size_t i = 0; is_in_place && i < schema.arguments().size(); ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      const bool is_written = alias != nullptr && alias->isWrite();
      is_in_place = is_written == (i == 0) && schema.arguments()[0].type()->kind() == c10::TypeKind::TensorType;
    }
  }

  // The step that Python has just made of a call, or found for it.
  void learn(const c10::OperatorHandle& op, const Lesson& lesson, c10::Device device) const {
    PyObject* step = R.stream.at.of(lesson.stream.get());
    if (step == lesson.before.get() || R.step.info.of(step) != info) return;
    CompiledStep* known = compiled(step);
    if (known != nullptr && known->recorded.get() == R.step.operands.of(step)) return;
    if (known == nullptr && R.step.compiled.of(step) != Py_None) return;  // it was tried
    auto made = Learner(op, lesson.arguments, device, info, step).learn();
    if (made == nullptr) return R.step.compiled.set(step, Py_False);
    Ref capsule = checked(PyCapsule_New(made.get(), CAPSULE, forget_step));
    made.release();
    R.step.compiled.give(step, std::move(capsule));
  }
};

struct Kernel final : c10::OperatorKernel, Known {
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    Way way = Way::PYTHON;
    Uncollected uncollected;
    Lesson lesson;
    if (R.open && c10::impl::TorchDispatchModeTLS::stack_len() == 1) {
      const Locked locked;
      const auto mode = c10::impl::TorchDispatchModeTLS::get_stack_at(0);
      PyObject* door = mode->ptr(getPyInterpreter());
      if (PyObject_TypeCheck(door, R.front_door)) {
        collect_if_due();
        uncollected.begin();
        const Timed timed(door);
        way = decide(op, door, *stack, lesson);
        ++taken[static_cast<int>(way)];
        if (way == Way::FOLLOWED) timed.ends();
        if (way != Way::PYTHON) uncollected.end();
        if (way == Way::FOLLOWED) return;
      }
    }
    if (way == Way::NATIVE) {
      const Below below;
      return op.callBoxed(stack);
    }
    into_python->callBoxed(op, keys, stack);
    if (lesson.stream) {
      const Locked locked;
      learn(op, lesson, c10::kCPU);
    }
  }

 private:
  Way decide(const c10::OperatorHandle& op, PyObject* door, Stack& stack, Lesson& lesson) const {
    static PyObject *const stream_name = name_of("stream"), *const lender = name_of("lender");
    if (treatment == UNKNOWN) {
      const Below below;
      ask(op);
    }
    if (treatment == OTHER) return Way::PYTHON;
    Ref held = checked(PyObject_GetAttr(door, stream_name));
    PyObject* stream = held.get();
    PyObject* policy = R.stream.policy.of(stream);
    PyObject* autotuner = R.policy.autotuner.of(policy);
    const Ref config = Ref::borrowed(R.stream.config.of(stream));
    const Settings settings = settings_of(config.get());
    if (!settings.follows || is_true(R.autotuner.waiting.of(autotuner))) return Way::PYTHON;
    const size_t count = op.schema().arguments().size();
    const Arguments given(stack.data() + stack.size() - count, count);
    for (const IValue& a : given)
      if (has_python_key(a)) return Way::PYTHON;
    PyObject* backoff = R.policy.backoff.of(policy);
    const bool in_backoff = is_true(R.backoff.left.of(backoff));
    if (in_backoff && PyFloat_AsDouble(R.backoff.due.of(backoff)) < monotonic()) return Way::PYTHON;
    if (treatment == READ)
      return !in_backoff && may_be_read(settings, autotuner, given[0]) ? Way::NATIVE : Way::PYTHON;
    if (in_backoff || (settings.measures && is_true(R.autotuner.native.of(autotuner)))) {
      if (writes_list || !nothing_is_pending()) return Way::PYTHON;
      return in_backoff || treatment != COMPUTE || counts_down(autotuner) ? Way::NATIVE : Way::PYTHON;
    }
    if (treatment == VIEW) return Way::NATIVE;
    if (!writes_list && settings.allows_islands && passes_to_other_device(given)) return Way::NATIVE;
    if (treatment != COMPUTE || checked(PyObject_GetAttr(door, lender)).get() != Py_None) return Way::PYTHON;
    const Alone alone;
    if (alone.waited()) {  // the thread that opened this context may have closed it, or others chosen otherwise
      const bool native = settings.measures && is_true(R.autotuner.native.of(autotuner));
      if (R.stream.config.of(stream) != config.get() || native || is_true(R.autotuner.waiting.of(autotuner)) ||
          is_true(R.backoff.left.of(backoff)))
        return Way::PYTHON;
    }
    if (R.stream.unfinished.of(stream) != Py_None) return Way::PYTHON;
    if (follow(settings, stream, given, stack, host())) return Way::FOLLOWED;
    if (is_tiny(stream, given)) return Way::NATIVE;
    lesson.before = Ref::borrowed(R.stream.at.of(stream));
    lesson.arguments.assign(given.begin(), given.end());
    lesson.stream = std::move(held);
    return Way::PYTHON;
  }

  // Whether one more op may run natively before Python has to see one (`Autotuner.countdown`).
  static bool counts_down(PyObject* autotuner) {
    const long left = PyLong_AsLong(R.autotuner.countdown.of(autotuner));
    if (left == 1) return false;
    if (left > 1) R.autotuner.countdown.set(autotuner, checked(PyLong_FromLong(left - 1)).get());
    return true;
  }

  // Whether all tensors lie on a device that is not fused; then it is counted (`recording.other_devices`).
  bool passes_to_other_device(Arguments given) const {
    const at::Tensor* one = nullptr;
    const auto is_away = [&one](const IValue& a) {
      if (!is_defined(a) || is_wrapped(a)) return true;
      one = &a.toTensor();
      return !one->is_cpu();
    };
    for (const IValue& a : given) {
      if (!holds_tensors(a)) {
        if (!is_away(a)) return false;
        continue;
      }
      for (const IValue& item : a.toListRef())
        if (!is_away(item)) return false;
    }
    if (one == nullptr) return false;
    const Ref device = checked(PyUnicode_FromString(one->device().str().c_str()));
    checked(PyObject_CallFunctionObjArgs(R.passed_to_other_device, info, device.get(), nullptr));
    return true;
  }

  // A number that an optimizer reads for itself: no boundary of the program's, and nothing to wait for.
  bool may_be_read(const Settings& settings, PyObject* autotuner, const IValue& given) const {
    static PyObject* const what = PyUnicode_FromString("sync aten._local_scalar_dense.default");
    if (settings.measures && !is_true(R.autotuner.stepping.of(autotuner))) return false;
    if (!given.isTensor() || !is_finished_number(given.toTensor())) return false;
    checked(PyObject_CallOneArg(R.count, what));
    return true;
  }

  // Whether ATen does it at once: an op in place on finished numbers, which nobody else was to read
  // (`recording.native.protect`).
  bool is_tiny(PyObject* stream, Arguments given) const {
    PyObject* step = expected_of(stream);
    if (!is_in_place || (step != Py_None && R.step.info.of(step) == info)) return false;
    for (const IValue& a : given)
      if (holds_tensors(a) || (is_defined(a) && !is_wrapped(a) && !is_finished_number(a.toTensor()))) return false;
    const Ref address = checked(address_of(given[0].toTensor().storage().unsafeGetStorageImpl()));
    const bool alone = PyDict_GET_SIZE(R.streams) == 1;
    if (alone ? found(R.stream.natives.of(stream), address.get()) != nullptr : is_awaited(address.get())) return false;
    return !is_being_read(address.get());
  }

};

// Kernels for all of `aten`, for as long as the process lives: torch has no lock between an op's dispatch and a change
// of its table, so that is done once and early, where a context is entered.
void register_kernels() {
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto other = dispatcher.findSchemaOrThrow("profiler::_record_function_enter_new", "");  // not one of ours
  into_python = new c10::SafeKernelFunction(other.getComputedKernelForDispatchKey(c10::DispatchKey::Python));
  // Never destroyed: what the kernels hold of Python would outlive it.
  auto& library = *new torch::Library(
      torch::Library::IMPL, "aten", std::make_optional(c10::DispatchKey::Python), __FILE__, __LINE__);
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.getNamespace() != std::make_optional<c10::string_view>("aten")) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::Python)) continue;
    std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>()));
  }
}

}  // namespace
}  // namespace fused_eager
