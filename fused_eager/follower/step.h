// A step of a remembered stream as C++ compares the next op with it.
//
// It is learned from a call that Python has just recorded or followed, and from the `Step` that this made. Everything
// that a call was made of is a slot: what Python hoists may be another number next time, anything else has to be equal.
// A call of which that cannot be said (a list of complex numbers) is left to Python.

#pragma once

#include "kinds.h"
#include "runtime.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/Dtype.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

namespace fused_eager {

using c10::IValue;
using Stack = std::vector<IValue>;
using Arguments = c10::ArrayRef<IValue>;

enum class Where { PENDING, NATIVE, DEVICE };

// One tensor that the call takes: how it is seen, and which value.
struct Operand {
  c10::SmallVector<int64_t, 5> sizes, strides;
  at::ScalarType dtype;
  bool negative, conjugate, moves, block_is_home;
  Where where;
  int64_t vid, offset, nbytes, itemsize;
  Ref home, block;

  bool sees(const at::Tensor& t) const {
    return t.sizes() == c10::IntArrayRef(sizes) && t.strides() == c10::IntArrayRef(strides) &&
        t.scalar_type() == dtype && t.is_neg() == negative && t.is_conj() == conjugate;
  }
};

struct Argument {
  enum Kind { TENSOR, TENSORS, NUMBER, NUMBERS, EXACT } kind;
  IValue value;                    // EXACT: what it has to be; NUMBER: one of its type
  std::optional<IValue> omitted;   // NUMBER: the value for which Python would not be told it
  std::vector<bool> shape;         // TENSORS: which are there; NUMBERS: which are floats
};

// What is handed back: a new tensor, an operand, or nothing.
struct Returned {
  enum Kind { FRESH, SAME, NOTHING } kind;
  size_t index = 0;
};

struct Output {
  c10::SmallVector<int64_t, 5> sizes, strides;
  at::ScalarType dtype;
  int64_t nbytes;
  Ref home, vid;
};

struct Write {
  size_t operand;
  bool covers;  // all that the storage holds
  Ref home, vid;
};

struct CompiledStep {
  std::vector<size_t> order;  // of the arguments, as Python sees them
  std::vector<Argument> arguments;
  std::vector<Operand> operands;
  std::vector<Output> outputs;
  std::vector<Write> writes;
  std::vector<Returned> returned;
  bool returns_list = false, is_island = false;
  std::optional<size_t> written_list;  // the argument whose elements get a new version
  at::ScalarType default_dtype;
  int64_t first_vid = -1;  // of its results
  Ref taken;               // the kinds of numbers that ATen takes, as far as it has been asked,
  Kinds kinds;             // and the last of them that came
  Ref recorded;            // the operands as Python has them: others are there when they have moved
};

inline bool is_tensor_we_know(const at::Tensor& t, c10::Device device) {
  return t.defined() && t.layout() == at::kStrided && t.device() == device && t.has_storage() &&
      !t.key_set().has(c10::DispatchKey::Python) && !t.is_nested() &&
      !t.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && !t.unsafeGetTensorImpl()->is_wrapped_number();
}

inline bool same_bits(double a, double b) { return std::memcmp(&a, &b, sizeof a) == 0; }

// A number or list that could be symbolic and is not, as what it is.
inline IValue concrete(const IValue& a) {
  if (a.isSymInt()) {
    const auto known = a.toSymInt().maybe_as_int();
    return known ? IValue(*known) : a;
  }
  if (!a.isSymIntList()) return a;
  c10::List<int64_t> numbers;
  for (const c10::SymInt& n : a.toSymIntVector()) {
    const auto known = n.maybe_as_int();
    if (!known) return a;
    numbers.push_back(*known);
  }
  return numbers;
}

inline bool same_value(const IValue& a, const IValue& b) {
  if (b.isSymInt() || b.isSymIntList()) {
    const IValue known = concrete(b);
    return !known.isSymInt() && !known.isSymIntList() && same_value(a, known);
  }
  if (a.isInt()) return b.isInt() && a.toInt() == b.toInt();
  if (a.isDouble()) return b.isDouble() && same_bits(a.toDouble(), b.toDouble());  // 0.0 and -0.0 are two numbers
  if (a.isBool()) return b.isBool() && a.toBool() == b.toBool();
  if (a.isNone()) return b.isNone();
  if (a.isIntList()) return b.isIntList() && a.toIntList() == b.toIntList();
  if (a.isBoolList()) return b.isBoolList() && a.toBoolList() == b.toBoolList();
  if (a.isString()) return b.isString() && a.toStringRef() == b.toStringRef();
  if (a.isDevice()) return b.isDevice() && a.toDevice() == b.toDevice();
  return a.isTensor() && b.isTensor() && !a.toTensor().defined() && !b.toTensor().defined();
}

inline bool holds_tensors(const IValue& a) { return a.isTensorList() || a.isOptionalTensorList(); }

inline bool is_defined(const IValue& a) { return a.isTensor() && a.toTensor().defined(); }

// An argument as Python is told it: a number that torch has wrapped into a tensor is a number again.
inline bool is_wrapped(const IValue& a) {
  return is_defined(a) && a.toTensor().unsafeGetTensorImpl()->is_wrapped_number();
}

inline IValue unwrapped(const IValue& a) {
  const at::Tensor& t = a.toTensor();
  switch (t.scalar_type()) {
    case at::kDouble:
      return *t.const_data_ptr<double>();
    case at::kLong:
      return *t.const_data_ptr<int64_t>();
    case at::kBool:
      return *t.const_data_ptr<bool>();
    default:
      return a;  // a complex one, which is compared with nothing
  }
}

// The arguments in the order in which Python is told them: first those with a position, then the others by name.
inline std::vector<size_t> python_order(const c10::FunctionSchema& schema) {
  const auto& declared = schema.arguments();
  std::vector<size_t> order(declared.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    if (declared[a].kwarg_only() != declared[b].kwarg_only()) return declared[b].kwarg_only();
    return declared[a].kwarg_only() && declared[a].name() < declared[b].name();
  });
  return order;
}

// Which arguments Python is not told, because they have their default values.
inline std::vector<bool> untold(const c10::FunctionSchema& schema, Arguments given) {
  const auto& declared = schema.arguments();
  std::vector<bool> found(given.size(), false);
  bool trailing = true;
  for (size_t i = given.size(); i-- > 0;) {
    const auto& value = declared[i].default_value();
    const bool has_tensors = holds_tensors(given[i]) || is_defined(given[i]);
    const bool is_default = value.has_value() && !has_tensors && *value == given[i];
    if (declared[i].kwarg_only()) {
      found[i] = is_default;
    } else {
      trailing = trailing && is_default;
      found[i] = trailing;
    }
  }
  return found;
}

// Takes a call apart as `calls.take` does. False where the two cannot be told to agree.
class Learner {
 public:
  Learner(const c10::OperatorHandle& op, Arguments given, c10::Device device, PyObject* info, PyObject* step)
      : schema_(op.schema()), given_(given), device_(device), info_(info), step_(step) {}

  std::unique_ptr<CompiledStep> learn() {
    call_ = Ref::borrowed(R.step.call.of(step_));
    node_ = R.step.node.of(step_);
    if (!take_arguments() || !take_operands() || !take_results() || !take_returned()) return nullptr;
    made_->taken = attribute(call_.get(), "taken");
    made_->is_island = is_true(attribute(info_, "island").get());
    if (is_true(attribute(info_, "writes_list").get())) {
      const Ref written = attribute(info_, "written");
      made_->written_list = number(PyTuple_GetItem(written.get(), 0));
    }
    made_->default_dtype = c10::typeMetaToScalarType(c10::get_default_dtype());
    return std::move(made_);
  }

 private:
  bool take_arguments() {
    const Ref hoisted = attribute(info_, "hoisted");
    const auto hidden = untold(schema_, given_);
    made_->order = python_order(schema_);
    made_->arguments.resize(given_.size());
    for (const size_t i : made_->order) {
      const bool wrapped = is_wrapped(given_[i]);
      const IValue a = wrapped ? unwrapped(given_[i]) : concrete(given_[i]);
      Argument& made = made_->arguments[i];
      const int hoists = PySet_Contains(hoisted.get(), checked(PyLong_FromSize_t(i)).get());
      checked(hoists);
      const bool told = hoists && !hidden[i];  // as a number that may be another one next time
      made.value = a;
      made.kind = Argument::EXACT;
      if (wrapped && a.isTensor()) return false;
      if (is_defined(a)) {
        made.kind = Argument::TENSOR;
        made.value = IValue();
        tensors_.push_back(&given_[i].toTensor());
      } else if (holds_tensors(a)) {
        made.kind = Argument::TENSORS;
        made.value = IValue();
        for (const IValue& item : given_[i].toListRef()) {
          made.shape.push_back(is_defined(item));
          if (is_defined(item)) tensors_.push_back(&item.toTensor());
        }
      } else if (told && (a.isInt() || a.isDouble())) {
        made.kind = Argument::NUMBER;
        made.omitted = schema_.arguments()[i].default_value();
        numbers_.push_back(a);
      } else if (told && a.isList() && !a.toListRef().empty()) {
        made.kind = Argument::NUMBERS;
        made.value = IValue();
        for (const IValue& item : a.toListRef()) {
          if (!item.isInt() && !item.isDouble()) return false;
          made.shape.push_back(item.isDouble());
          numbers_.push_back(item);
        }
      } else if (!same_value(a, a)) {
        return false;
      }
    }
    return true;
  }

  bool take_operands() {
    PyObject* recorded = R.step.operands.of(step_);
    const Ref views = attribute(call_.get(), "views");
    const auto count = static_cast<Py_ssize_t>(tensors_.size());
    if (PyTuple_GET_SIZE(recorded) != count || PyTuple_GET_SIZE(views.get()) != count) return false;
    size_t moving = 0;
    for (Py_ssize_t k = 0; k < count; ++k) {
      const at::Tensor& t = *tensors_[k];
      if (!is_tensor_we_know(t, device_)) return false;
      PyObject* row = PyTuple_GET_ITEM(recorded, k);  // vid, offset, moves, nbytes, where, home
      PyObject* view = PyTuple_GET_ITEM(views.get(), k);
      Operand o;
      o.sizes.assign(t.sizes().begin(), t.sizes().end());
      o.strides.assign(t.strides().begin(), t.strides().end());
      o.dtype = t.scalar_type();
      o.negative = t.is_neg();
      o.conjugate = t.is_conj();
      o.vid = number(PyTuple_GET_ITEM(row, 0));
      o.offset = number(PyTuple_GET_ITEM(row, 1));
      o.moves = is_true(PyTuple_GET_ITEM(row, 2));
      o.nbytes = number(PyTuple_GET_ITEM(row, 3));
      const char* where = PyUnicode_AsUTF8(PyTuple_GET_ITEM(row, 4));
      if (where == nullptr) raise();
      o.where = where[0] == 'p' ? Where::PENDING : where[0] == 'n' ? Where::NATIVE : Where::DEVICE;
      o.home = Ref::borrowed(PyTuple_GET_ITEM(row, 5));
      o.block = attribute(view, "block");
      o.itemsize = number(attribute(view, "itemsize").get());
      o.block_is_home = equal(o.block.get(), o.home.get());
      moving += o.where != Where::NATIVE && o.moves;
      made_->operands.push_back(std::move(o));
    }
    made_->recorded = Ref::borrowed(recorded);
    // The node has the same numbers: so both agree on what is hoisted, and in which order.
    PyObject* scalars = R.node.scalars.of(node_);
    if (PyList_GET_SIZE(scalars) != static_cast<Py_ssize_t>(numbers_.size() + moving)) return false;
    for (size_t k = 0; k < numbers_.size(); ++k) {
      PyObject* known = PyList_GET_ITEM(scalars, k);
      if (numbers_[k].isDouble() ? !PyFloat_CheckExact(known) : !PyLong_CheckExact(known)) return false;
    }
    return true;
  }

  bool take_results() {
    const Ref outputs = attribute(call_.get(), "outputs"), written = attribute(call_.get(), "written");
    PyObject* results = R.node.results.of(node_);
    const auto fresh = PyTuple_GET_SIZE(outputs.get()), all = PyTuple_GET_SIZE(results);
    if (all != fresh + PyTuple_GET_SIZE(written.get())) return false;
    for (Py_ssize_t k = 0; k < all; ++k) {
      PyObject* result = PyTuple_GET_ITEM(results, k);
      PyObject* vid = PyTuple_GET_ITEM(result, 0);
      if (k == 0) made_->first_vid = number(vid);
      if (k < fresh) {
        PyObject* output = PyTuple_GET_ITEM(outputs.get(), k);
        const Ref spec = attribute(output, "spec"), dtype = attribute(spec.get(), "dtype");
        Output o;
        take_numbers(attribute(spec.get(), "shape").get(), o.sizes);
        take_numbers(attribute(spec.get(), "strides").get(), o.strides);
        o.dtype = reinterpret_cast<THPDtype*>(dtype.get())->scalar_type;
        o.nbytes = number(attribute(output, "nbytes").get());
        o.home = attribute(output, "home");
        o.vid = Ref::borrowed(vid);
        made_->outputs.push_back(std::move(o));
      } else {
        const auto operand = number(PyTuple_GET_ITEM(written.get(), k - fresh));
        const bool covers = PyTuple_GET_ITEM(result, 3) == Py_None;  // vid, home, geometry, base
        made_->writes.push_back(
            {static_cast<size_t>(operand), covers, Ref::borrowed(PyTuple_GET_ITEM(result, 1)), Ref::borrowed(vid)});
      }
    }
    return true;
  }

  static void take_numbers(PyObject* tuple, c10::SmallVector<int64_t, 5>& into) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) into.push_back(number(PyTuple_GET_ITEM(tuple, i)));
  }

  bool take_returned() {
    const Ref template_ = attribute(call_.get(), "template");
    const auto& declared = schema_.returns();
    PyObject* t = template_.get();
    if (declared.empty()) return t == Py_None;
    const bool many = PyTuple_CheckExact(t) || PyList_CheckExact(t);
    made_->returns_list = declared.size() == 1 && many;
    if (made_->returns_list && declared[0].type()->kind() != c10::TypeKind::ListType) return false;
    if (!many) return declared.size() == 1 && take_leaf(t);
    const Ref items = checked(PySequence_Fast(t, "a template"));
    const auto count = PySequence_Fast_GET_SIZE(items.get());
    if (!made_->returns_list && count != static_cast<Py_ssize_t>(declared.size())) return false;
    for (Py_ssize_t i = 0; i < count; ++i)
      if (!take_leaf(PySequence_Fast_GET_ITEM(items.get(), i))) return false;
    return true;
  }

  bool take_leaf(PyObject* leaf) {
    if (leaf == Py_None) {
      if (made_->returns_list) return false;
      made_->returned.push_back({Returned::NOTHING});
      return true;
    }
    const std::string kind = Py_TYPE(leaf)->tp_name;
    if (kind != "Fresh" && kind != "Same") return false;
    const auto index = static_cast<size_t>(number(attribute(leaf, "index").get()));
    made_->returned.push_back({kind == "Fresh" ? Returned::FRESH : Returned::SAME, index});
    return true;
  }

  const c10::FunctionSchema& schema_;
  Arguments given_;
  c10::Device device_;
  PyObject *info_, *step_, *node_ = nullptr;
  Ref call_;
  std::vector<const at::Tensor*> tensors_;
  std::vector<IValue> numbers_;
  std::unique_ptr<CompiledStep> made_ = std::make_unique<CompiledStep>();
};

}  // namespace fused_eager
