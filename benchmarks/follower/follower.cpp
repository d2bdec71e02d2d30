// A prototype of a compiled follower: see docs/compiled_follower.md for what it is to find out.
//
// It is a boxed fallback on a dispatch key that a thread switches on for itself. A call is compared with the next step
// of one remembered stream: the overload, the line it came from, each operand (which value it sees, and how)
// and each structural argument. If all of it is the same, the outputs are handed out unwritten and Python is not
// entered. At the first difference what was handed out is computed, and the Python mode on the stack gets the call.
//
// Not here: in-place ops, several remembered streams, threads, compiling anything, errors while computing (they end the
// process). Views run at once, as in the library.

#include <Python.h>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/PythonFallbackKernel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/flat_hash_map.h>
#include <torch/library.h>

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

// Below autograd and Python, above every backend, and no kernel of torch 2.13 is registered for it.
constexpr auto OURS = DispatchKey::Fake;
const DispatchKeySet BELOW(DispatchKeySet::FULL_AFTER, OURS);
const DispatchKeySet PYTHON({DispatchKey::Python, DispatchKey::PythonTLSSnapshot});

// A value of the stream as an operand sees it. `vid`: values are numbered as they are first seen.
struct View {
  int64_t vid;
  DispatchKeySet keys;  // conjugate, negative, subclass, dtype's backend: all in one word
  caffe2::TypeMeta dtype;
  c10::SmallVector<int64_t, 4> sizes, strides;
  int64_t offset;
  size_t nbytes;
};

// The line that a call comes from: that of the innermost frame. The library goes on to the first line of the program.
struct Place {
  PyObject* code = nullptr;  // borrowed: the program being followed is loaded
  int line = -1;
  bool operator==(const Place& o) const { return code == o.code && line == o.line; }
};

struct Slot {
  enum Kind { TENSOR, TENSORS, NUMBER, EXACT } kind;
  IValue value;  // EXACT: what it has to be; NUMBER: its type
  size_t count = 0;  // TENSORS
};

struct Step {
  OperatorHandle op;
  Place place;
  at::ScalarType default_dtype;
  std::vector<Slot> slots;
  std::vector<View> operands, outputs;
};

enum Mode { RECORDING, FOLLOWING, LEFT };

struct State {
  Mode mode = LEFT;
  bool check_place = true, allocate = true, closed = false;
  std::vector<Step> steps;
  size_t next = 0;
  ska::flat_hash_map<c10::StorageImpl*, int64_t> vids;
  std::vector<c10::Storage> values;  // by vid: an address must not come again while it stands for a value
  std::vector<IValue> numbers;       // of the steps followed, in order
  int64_t followed = 0, missed = 0;
};
thread_local State state;

// torch's bindings have let go of the interpreter's lock by now. An engine's thread runs no program: it has no line.
Place here() {
  if (!state.check_place || PyGILState_GetThisThreadState() == nullptr) return {};
  const auto lock = PyGILState_Ensure();
  Place place;
  if (auto* frame = PyEval_GetFrame()) {
    auto* code = reinterpret_cast<PyObject*>(PyFrame_GetCode(frame));
    Py_DECREF(code);
    place = {code, PyFrame_GetLineNumber(frame)};
  }
  PyGILState_Release(lock);
  return place;
}

// The number of the value in a storage; the next free one if the stream has not seen it, which makes it an input.
int64_t vid_of(const c10::Storage& storage) {
  auto [found, is_new] = state.vids.emplace(storage.unsafeGetStorageImpl(), state.values.size());
  if (is_new) state.values.push_back(storage);
  return found->second;
}

View view_of(const at::Tensor& t) {
  View v{vid_of(t.storage()), t.key_set(), t.dtype(), {}, {}, t.storage_offset(), t.storage().nbytes()};
  v.sizes.assign(t.sizes().begin(), t.sizes().end());
  v.strides.assign(t.strides().begin(), t.strides().end());
  return v;
}

bool same(const at::Tensor& t, const View& v) {
  if (!t.defined() || t.key_set() != v.keys || t.dtype() != v.dtype || t.sizes() != at::IntArrayRef(v.sizes) ||
      t.strides() != at::IntArrayRef(v.strides) || t.storage_offset() != v.offset)
    return false;
  const auto& storage = t.storage();
  return storage.nbytes() == v.nbytes && vid_of(storage) == v.vid;
}

bool same(const IValue& a, const IValue& b) {
  if (a.isDouble() && b.isDouble()) {  // by its bits: 0.0 and -0.0 are two numbers
    double x = a.toDouble(), y = b.toDouble();
    return std::memcmp(&x, &y, sizeof x) == 0;
  }
  if (a.isIntList() && b.isIntList()) return a.toIntList() == b.toIntList();
  if (a.isInt() && b.isInt()) return a.toInt() == b.toInt();
  if (a.isBool() && b.isBool()) return a.toBool() == b.toBool();
  if (a.isNone() && b.isNone()) return true;
  return a.tagKind() == b.tagKind() && a.equals(b).toBool();
}

// ---- handing out ---------------------------------------------------------------------------------------------------

at::Tensor pending(const View& v) {
  at::Tensor t;
  if (state.allocate) {
    t = at::Tensor(at::detail::empty_strided_cpu(v.sizes, v.strides, v.dtype.toScalarType()));
  } else {  // the value will bring its memory along
    auto storage = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), v.nbytes, at::DataPtr(nullptr, at::kCPU), c10::GetAllocator(at::kCPU), true);
    t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), v.keys, v.dtype);
    t.unsafeGetTensorImpl()->set_sizes_and_strides(v.sizes, v.strides);
  }
  auto* storage = t.storage().unsafeGetStorageImpl();
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(std::nullopt);  // any raw access raises
  storage->set_throw_on_mutable_data_ptr();
  return t;
}

bool follow(const OperatorHandle& op, Stack* stack) {
  auto& s = state;
  if (s.next == s.steps.size()) return false;
  const Step& step = s.steps[s.next];
  if (!(step.op == op) || c10::typeMetaToScalarType(c10::get_default_dtype()) != step.default_dtype) return false;
  if (s.check_place && !(here() == step.place)) return false;
  const auto args = torch::jit::last(*stack, step.slots.size());
  const size_t numbers = s.numbers.size();
  size_t operand = 0;
  for (size_t i = 0; i < args.size(); ++i) {
    const Slot& slot = step.slots[i];
    const IValue& a = args[i];
    bool good = true;
    switch (slot.kind) {
      case Slot::TENSOR:
        good = a.isTensor() && same(a.toTensor(), step.operands[operand++]);
        break;
      case Slot::TENSORS: {
        good = a.isTensorList() && a.toTensorList().size() == slot.count;
        for (size_t k = 0; good && k < slot.count; ++k) good = same(a.toTensorList().get(k), step.operands[operand++]);
        break;
      }
      case Slot::NUMBER:
        good = a.tagKind() == slot.value.tagKind();
        s.numbers.push_back(a);
        break;
      case Slot::EXACT:
        good = same(a, slot.value);
    }
    if (!good) {
      s.numbers.resize(numbers);
      return false;
    }
  }
  torch::jit::drop(*stack, args.size());
  for (const View& v : step.outputs) {
    at::Tensor t = pending(v);
    vid_of(t.storage());
    stack->emplace_back(std::move(t));
  }
  ++s.next;
  ++s.followed;
  return true;
}

// ---- computing -----------------------------------------------------------------------------------------------------

void forget() {
  state.next = 0;
  state.vids.clear();
  state.values.clear();
  state.numbers.clear();
}

at::Tensor rebuilt(const View& v) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(state.values[v.vid]), v.keys, v.dtype);
  t.unsafeGetTensorImpl()->set_sizes_and_strides(v.sizes, v.strides, v.offset);
  return t;
}

// Compute what was handed out, op by op through ATen; in the library it is one compiled region.
void flush() {
  c10::impl::ExcludeDispatchKeyGuard alone(PYTHON.add(OURS));
  at::AutoDispatchBelowADInplaceOrView below;
  auto& s = state;
  size_t number = 0;
  for (size_t i = 0; i < s.next; ++i) {
    const Step& step = s.steps[i];
    Stack stack;
    size_t operand = 0;
    for (const Slot& slot : step.slots) {
      if (slot.kind == Slot::TENSOR) {
        stack.emplace_back(rebuilt(step.operands[operand++]));
      } else if (slot.kind == Slot::TENSORS) {
        c10::List<at::Tensor> list;
        for (size_t k = 0; k < slot.count; ++k) list.push_back(rebuilt(step.operands[operand++]));
        stack.emplace_back(std::move(list));
      } else {
        stack.push_back(slot.kind == Slot::NUMBER ? s.numbers[number++] : slot.value);
      }
    }
    step.op.callBoxed(stack);
    for (size_t k = 0; k < step.outputs.size(); ++k) {
      auto* mine = s.values[step.outputs[k].vid].unsafeGetStorageImpl();
      const auto& value = stack[k].toTensor();
      mine->swap_data_ptr(*value.storage().unsafeGetStorageImpl());  // the flags that raise go with it
    }
  }
  forget();
}

// ---- what is not followed ------------------------------------------------------------------------------------------

void natively(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard alone(OURS);
  op.redispatchBoxed(keys & BELOW, stack);
}

// The Python mode stays on its stack, where a miss finds it; torch does not go through Python to get here.
void pass_python(bool include) {
  c10::impl::tls_set_dispatch_key_included(DispatchKey::Python, include);
  c10::impl::tls_set_dispatch_key_included(DispatchKey::PythonTLSSnapshot, include);
}

void in_python(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  if (c10::impl::TorchDispatchModeTLS::stack_len() == 0) return natively(op, keys, stack);
  {
    c10::impl::ExcludeDispatchKeyGuard alone(OURS);
    at::impl::MaybeSetTLSOnEntryGuard entry;
    op.redispatchBoxed((keys & BELOW).add(DispatchKey::Python), stack);
  }
  pass_python(false);  // a mode that goes back onto its stack switches its keys on
}

bool is_view(const OperatorHandle& op) {
  const auto& schema = op.schema();
  if (schema.is_mutable()) return false;
  for (const auto& r : schema.returns())
    if (r.alias_info() != nullptr) return true;
  return false;
}

void record(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  auto& s = state;
  const auto& schema = op.schema();
  Step step{op, here(), c10::typeMetaToScalarType(c10::get_default_dtype()), {}, {}, {}};
  bool good = !schema.is_mutable() && !s.closed;
  const auto args = torch::jit::last(*stack, schema.arguments().size());
  for (size_t i = 0; good && i < args.size(); ++i) {
    const IValue& a = args[i];
    if (a.isTensor()) {
      good = a.toTensor().defined() && a.toTensor().is_cpu() && a.toTensor().layout() == at::kStrided;
      if (good) step.operands.push_back(view_of(a.toTensor()));
      step.slots.push_back({Slot::TENSOR, {}});
    } else if (a.isTensorList()) {
      const auto list = a.toTensorList();
      for (const at::Tensor& t : list) step.operands.push_back(view_of(t));
      step.slots.push_back({Slot::TENSORS, {}, list.size()});
    } else if (schema.arguments()[i].type()->kind() == c10::TypeKind::NumberType && (a.isDouble() || a.isInt())) {
      step.slots.push_back({Slot::NUMBER, a});
    } else {
      good = a.isNone() || a.isInt() || a.isDouble() || a.isBool() || a.isIntList();
      step.slots.push_back({Slot::EXACT, a});
    }
  }
  const size_t known = s.values.size();
  in_python(op, keys, stack);
  const auto results = torch::jit::last(*stack, schema.returns().size());
  for (size_t i = 0; good && i < results.size(); ++i) {
    good = results[i].isTensor() && results[i].toTensor().defined() && results[i].toTensor().is_cpu();
    if (!good) break;
    step.outputs.push_back(view_of(results[i].toTensor()));
    good = step.outputs.back().vid == static_cast<int64_t>(known + i) && step.outputs.back().offset == 0;
  }
  if (good && !results.empty())
    s.steps.push_back(std::move(step));
  else
    s.closed = true;
}

void fallback(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  if (state.mode == FOLLOWING && follow(op, stack)) return;
  if (state.mode != LEFT && is_view(op)) return natively(op, keys, stack);
  if (state.mode == RECORDING) return record(op, keys, stack);
  if (state.mode == FOLLOWING) {
    ++state.missed;
    flush();
    state.mode = LEFT;
  }
  in_python(op, keys, stack);
}

TORCH_LIBRARY_IMPL(_, Fake, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

void switch_on(Mode mode) {
  forget();
  state.mode = mode;
  c10::impl::tls_set_dispatch_key_included(OURS, true);
  pass_python(false);
}

}  // namespace

extern "C" {

// The calls from here on become the remembered stream.
void follower_record() {
  state.steps.clear();
  state.closed = false;
  state.check_place = true;
  switch_on(RECORDING);
}

// The calls from here on are compared with it. `check_place`: the line counts; `allocate`: outputs have memory at once.
void follower_follow(int check_place, int allocate) {
  state.check_place = check_place != 0;
  state.allocate = allocate != 0;
  switch_on(FOLLOWING);
}

void follower_flush() { flush(); }

// As if what was handed out would never be looked at: for measuring following alone.
void follower_forget() { forget(); }

void follower_off() {
  flush();
  state.mode = LEFT;
  c10::impl::tls_set_dispatch_key_included(OURS, false);
  pass_python(c10::impl::TorchDispatchModeTLS::stack_len() > 0);
}

int64_t follower_steps() { return static_cast<int64_t>(state.steps.size()); }
int64_t follower_followed() { return state.followed; }
int64_t follower_missed() { return state.missed; }
}
