// Following: an op that does what a remembered stream did next is handed out, and Python is not asked.
//
// What `recording/follow.py` does, on the same objects, so that a stream may be followed here and recorded
// there op by op.
// Whatever is unusual (native memory that others see, operands that share memory with one that is written) is declined,
// as is any difference: Python then looks for itself. Nothing has been changed by then.

#pragma once

#include "tensors.h"

#include <ATen/SequenceNumber.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/Storage.h>
#include <frameobject.h>

#include <algorithm>
#include <unordered_map>

namespace fused_eager {

inline PyObject* address_of(const c10::StorageImpl* storage) {
  return PyLong_FromVoidPtr(const_cast<c10::StorageImpl*>(storage));
}

// The line of an op, for its gradient: autograd's number of the node that was made for it ties the two together.
inline void remember_for_gradient(PyObject* place) {
  static PyObject *const forward = name_of("_forward"), *const add = name_of("add");
  thread_local uint64_t last = 0;
  const uint64_t next = at::sequence_number::peek();
  if (next == last || !c10::GradMode::is_enabled()) return;  // the first op after a node was made is the node's
  last = next;
  checked(PyObject_CallMethodOneArg(found(R.site, forward), add, place));
}

inline bool is_on_line(PyObject* line) {
  static PyObject* const known_name = name_of("_is_internal");
  PyObject* known = found(R.site, known_name);
  Ref frame = Ref::borrowed(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame) {
    auto* f = reinterpret_cast<PyFrameObject*>(frame.get());
    const Ref code(reinterpret_cast<PyObject*>(PyFrame_GetCode(f)));
    const bool expected = line != Py_None && PyTuple_GET_ITEM(line, 0) == code.get();
    if (!expected) {
      PyObject* file = reinterpret_cast<PyCodeObject*>(code.get())->co_filename;
      PyObject* internal = found(known, file);
      const Ref asked = internal == nullptr ? checked(PyObject_CallOneArg(R.is_internal, file)) : Ref();
      if (!is_true(internal == nullptr ? asked.get() : internal)) return false;
      frame = Ref(reinterpret_cast<PyObject*>(PyFrame_GetBack(f)));
      continue;
    }
    return PyFrame_GetLineNumber(f) == number(PyTuple_GET_ITEM(line, 1));
  }
  return line == Py_None;
}

// Whether the op comes from the line at which it was recorded: the innermost one outside of torch and this library.
// Where somebody wants details it was recorded as a `Place`, whose last part is that line.
inline bool is_at(PyObject* place) {
  static PyObject* const details = name_of("_details");
  const bool detailed = number(found(R.site, details)) != 0 && place != Py_None;
  if (detailed ? Py_TYPE(place) != R.place_type : place != Py_None && !PyTuple_CheckExact(place)) return false;
  if (!is_on_line(detailed ? PyTuple_GET_ITEM(place, 4) : place)) return false;
  if (detailed && PyTuple_GET_ITEM(place, 3) == Py_False) remember_for_gradient(place);
  return true;
}

// An input that the op brings to the stream if it turns out to be followed.
struct Missing {
  const c10::Storage* storage;
  PyObject *buffer, *block;  // of the operand; no buffer: native memory
  int64_t offset;            // bytes
};

class Follower {
  static constexpr size_t FEW = 8;

 public:
  Follower(CompiledStep& step, PyObject* remembered, PyObject* stream, const Memory& memory)
      : c_(step), step_(remembered), stream_(stream), memory_(memory) {}

  // Whether the call is the one that came next last time. Nothing has been changed by then.
  bool compare(Arguments given) {
    try {
      if (c_.recorded.get() != R.step.operands.of(step_) || !matches(given) || !takes_numbers()) return false;
      if (!is_at(R.node.place.of(last()))) return false;
      vids_ = number(R.stream.vids.of(stream_));
      at_ = R.stream.at.of(stream_);
      if (!finds_operands() || !may_write()) return false;
      return c_.first_vid < 0 || vids_ + static_cast<int64_t>(missing_.size()) == c_.first_vid;
    } catch (const c10::Error&) {
      return false;  // a tensor that answers no such questions: Python finds out which
    }
  }

  // Record the call, which has been compared: its results are on the stack instead of its arguments then. Returns
  // false, and has recorded nothing, if the stream has gone on meanwhile: whatever Python does may end in a finalizer.
  bool record(Stack& stack) {
    const Ref node = with_numbers();
    make_outputs();
    if (!is_where_it_was()) return false;
    add_inputs();
    open_natives();
    vids_ += static_cast<int64_t>(missing_.size());
    if (!is_where_it_was()) {
      release_opened();
      return false;
    }
    hand_out();
    checked(PyList_Append(R.stream.nodes.of(stream_), node.get()));
    R.stream.vids.set(stream_, R.step.vids.of(step_));
    went();
    for (const at::Tensor* t : rewritten_)
      if (!t->is_inference()) t->unsafeGetTensorImpl()->bump_version();
    const auto results = returned();
    stack.resize(stack.size() - c_.arguments.size());
    if (c_.returns_list)
      stack.emplace_back(c10::List<at::Tensor>(results));
    else
      stack.insert(stack.end(), results.begin(), results.end());
    return true;
  }

 private:
  PyObject* last() const { return R.step.node.of(step_); }  // the node of last time

  bool matches(Arguments given) {
    for (const size_t i : c_.order) {
      const Argument& wanted = c_.arguments[i];
      if (wanted.kind == Argument::TENSOR) {
        if (!given[i].isTensor() || !takes(given[i].toTensor())) return false;
        continue;
      }
      const IValue held = is_wrapped(given[i]) ? unwrapped(given[i]) : IValue();
      const IValue& a = held.isNone() ? given[i] : held;
      switch (wanted.kind) {
        case Argument::TENSOR:
          break;  // above
        case Argument::TENSORS: {
          if (!holds_tensors(a)) return false;
          const auto items = a.toListRef();
          if (items.size() != wanted.shape.size()) return false;
          for (size_t k = 0; k < items.size(); ++k) {
            if (is_defined(items[k]) != wanted.shape[k]) return false;
            if (!wanted.shape[k]) continue;
            if (!takes(items[k].toTensor())) return false;
            if (c_.written_list != i) continue;
            if (items[k].toTensor().is_inference() && !c10::InferenceMode::is_enabled()) return false;  // ATen refuses it
            rewritten_.push_back(&items[k].toTensor());
          }
          break;
        }
        case Argument::NUMBER:
          if (wanted.value.isInt() ? !a.isInt() : !a.isDouble()) return false;
          if (wanted.omitted && same_value(*wanted.omitted, a)) return false;
          numbers_.push_back(a);
          break;
        case Argument::NUMBERS: {
          if (!a.isList()) return false;
          const auto items = a.toListRef();
          if (items.size() != wanted.shape.size()) return false;
          for (size_t k = 0; k < items.size(); ++k) {
            if (wanted.shape[k] ? !items[k].isDouble() : !items[k].isInt()) return false;
            numbers_.push_back(items[k]);
          }
          break;
        }
        case Argument::EXACT:
          if (!same_value(wanted.value, a)) return false;
      }
    }
    return tensors_.size() == c_.operands.size();
  }

  bool takes(const at::Tensor& t) {
    const size_t k = tensors_.size();
    if (k == c_.operands.size() || !is_tensor_we_know(t, memory_.device) || !c_.operands[k].sees(t)) return false;
    tensors_.push_back(&t);
    return true;
  }

  // Whether ATen is known to take numbers of these kinds.
  bool takes_numbers() {
    if (numbers_.empty()) return true;
    Kinds kinds;
    for (const IValue& n : numbers_) kinds.push_back(kind_of(n.isInt() ? static_cast<double>(n.toInt()) : n.toDouble()));
    if (kinds == c_.kinds) return true;
    const Ref key = checked(PyBytes_FromStringAndSize(kinds.data(), static_cast<Py_ssize_t>(kinds.size())));
    const int found = PySet_Contains(c_.taken.get(), key.get());
    checked(found);
    if (found == 1) c_.kinds = kinds;
    return found == 1;
  }

  bool finds_operands() {
    for (size_t k = 0; k < tensors_.size(); ++k) {
      const Operand& o = c_.operands[k];
      const c10::Storage& storage = tensors_[k]->storage();
      const int64_t offset = tensors_[k]->storage_offset();
      if (static_cast<int64_t>(storage.nbytes()) != o.nbytes) return false;
      const Ref address = checked(address_of(storage.unsafeGetStorageImpl()));
      PyObject* buffer = found(memory_.table, address.get());
      if (buffer != nullptr && R.buffer.stream.of(buffer) == stream_) {
        if (number(R.buffer.vid.of(buffer)) != o.vid) return false;
      } else if (input_of(storage, address.get(), buffer, o, offset * o.itemsize) != o.vid) {
        return false;
      }
      found_.push_back(Ref::borrowed(buffer));
      if (o.where == Where::NATIVE) continue;  // it is its own input, wherever it begins
      if (o.moves)
        numbers_.emplace_back(offset);
      else if (offset != o.offset)
        return false;
    }
    return true;
  }

  // The number that the value of a tensor which is not pending here has as an input; -1 where Python has to say.
  int64_t input_of(const c10::Storage& storage, PyObject* address, PyObject* buffer, const Operand& o, int64_t offset) {
    if (buffer == nullptr) {
      if (o.where != Where::NATIVE || !o.block_is_home) return -1;
      PyObject* known = found(R.stream.natives.of(stream_), address);
      if (known != nullptr) {
        const Ref begins = checked(PyLong_FromLongLong(offset));
        const Ref key = checked(PyTuple_Pack(2, o.block.get(), begins.get()));
        PyObject* input = found(known, key.get());
        if (input != nullptr) return number(R.native.vid.of(input));
      }
      if (o.nbytes != 0 && storage.unsafeGetStorageImpl()->data() == nullptr) return -1;
    } else {
      if (o.where != Where::DEVICE || R.buffer.stream.of(buffer) != Py_None || R.buffer.error.of(buffer) != Py_None ||
          R.buffer.array.of(buffer) == Py_None || !equal(R.buffer.home.of(buffer), o.home.get()))
        return -1;
      PyObject* known = found(R.stream.reads.of(stream_), address);
      if (known != nullptr && R.read.array.of(known) == R.buffer.array.of(buffer))
        return number(R.read.vid.of(known));
    }
    const size_t k = missing_at(storage);
    if (k < missing_.size()) {
      if (buffer == nullptr) return -1;  // whether it is the same input depends on who else writes that memory
      return vids_ + static_cast<int64_t>(k);
    }
    missing_.push_back({&storage, buffer, o.block.get(), offset});
    if (missing_.size() > FEW) places_.emplace(storage.unsafeGetStorageImpl(), k);
    return vids_ + static_cast<int64_t>(k);
  }

  // Where a storage is among the inputs that the op brings; their number, if it is not one of them. Lists of thousands
  // of tensors are looked up, the few operands of other ops looked through.
  size_t missing_at(const c10::Storage& storage) const {
    const c10::StorageImpl* const wanted = storage.unsafeGetStorageImpl();
    for (size_t k = 0; k < std::min(missing_.size(), FEW); ++k)
      if (missing_[k].storage->unsafeGetStorageImpl() == wanted) return k;
    const auto found = places_.find(wanted);
    return found == places_.end() ? missing_.size() : found->second;
  }

  c10::StorageImpl* storage_of(size_t k) const { return tensors_[k]->storage().unsafeGetStorageImpl(); }

  Ref python_storage(size_t k) const { return checked(THPStorage_Wrap(tensors_[k]->storage())); }

  // Whether native memory has to be written by ATen, because others look at it.
  bool must_stay(size_t k) const {
    return is_true(checked(PyObject_CallOneArg(R.must_stay, python_storage(k).get())).get());
  }

  bool may_write() const {
    for (const Write& w : c_.writes) {
      if (!found_[w.operand] && (!w.covers || must_stay(w.operand))) return false;
      if (tensors_[w.operand]->storage_offset() != c_.operands[w.operand].offset) return false;
    }
    return c_.writes.size() < 2 ? c_.writes.empty() || is_single(c_.writes[0].operand) : are_single();
  }

  // Whether no other operand lies in the memory of this one.
  bool is_single(size_t operand) const {
    for (size_t k = 0; k < tensors_.size(); ++k)
      if (k != operand && storage_of(k) == storage_of(operand)) return false;
    return true;
  }

  // Whether that holds for all that are written.
  bool are_single() const {
    std::unordered_map<const c10::StorageImpl*, size_t> times;
    for (size_t k = 0; k < tensors_.size(); ++k) ++times[storage_of(k)];
    for (const Write& w : c_.writes)
      if (times[storage_of(w.operand)] > 1) return false;
    return true;
  }

  // The node of last time, or one with other numbers.
  Ref with_numbers() const {
    PyObject* known = R.node.scalars.of(last());
    const auto count = static_cast<Py_ssize_t>(numbers_.size());
    bool same = PyList_GET_SIZE(known) == count;
    for (Py_ssize_t k = 0; same && k < count; ++k) {
      PyObject* scalar = PyList_GET_ITEM(known, k);
      if (PyFloat_CheckExact(scalar))
        same = numbers_[k].isDouble() && same_bits(numbers_[k].toDouble(), PyFloat_AS_DOUBLE(scalar));
      else
        same = PyLong_CheckExact(scalar) && numbers_[k].isInt() && numbers_[k].toInt() == number(scalar);
    }
    if (same) return Ref::borrowed(last());
    const Ref list = checked(PyList_New(count));
    for (Py_ssize_t k = 0; k < count; ++k) {
      const IValue& a = numbers_[k];
      Ref scalar = checked(a.isDouble() ? PyFloat_FromDouble(a.toDouble()) : PyLong_FromLongLong(a.toInt()));
      PyList_SET_ITEM(list.get(), k, scalar.release());
    }
    return checked(PyObject_CallFunctionObjArgs(R.with_scalars, last(), list.get(), nullptr));
  }

  // New tensors whose values are to come, with their buffers; nothing knows of them yet.
  void make_outputs() {
    for (const Output& o : c_.outputs) {
      at::Tensor t = new_tensor(o, memory_);
      auto* storage = t.storage().unsafeGetStorageImpl();
      Ref address = checked(address_of(storage)), wrapped = checked(THPStorage_Wrap(t.storage()));
      Ref made = checked(memory_.buffer_type->tp_alloc(memory_.buffer_type, 0));
      PyObject* b = made.get();
      R.buffer.array.set(b, Py_None);
      R.buffer.origin.set(b, Py_None);
      R.buffer.error.set(b, Py_None);
      R.buffer.previous.set(b, Py_None);
      R.buffer.born_native.set(b, Py_False);
      R.buffer.vacant.set(b, Py_False);
      R.buffer.home.set(b, o.home.get());
      R.buffer.vid.set(b, o.vid.get());
      R.buffer.epoch.set(b, R.stream.epoch.of(stream_));
      R.buffer.stream.set(b, stream_);
      R.buffer.cdata.set(b, address.get());
      R.buffer.storage.give(b, std::move(wrapped));
      if (memory_.accelerator != nullptr) {
        R.of_device.set(b, memory_.accelerator);
        R.of_table.set(b, memory_.table);
      }
      fresh_.push_back({std::move(t), std::move(address), std::move(made)});
    }
  }

  void add_device_input(PyObject* buffer) const {
    Ref made = checked(R.device_input_type->tp_alloc(R.device_input_type, 0));
    PyObject* input = made.get();
    PyObject* vid = R.stream.vids.of(stream_);
    R.read.vid.set(input, vid);
    R.read.buffer.set(input, buffer);
    R.read.home.set(input, R.buffer.home.of(buffer));
    R.read.array.set(input, R.buffer.array.of(buffer));
    R.read.origin.set(input, R.buffer.origin.of(buffer));
    checked(PyList_Append(R.stream.inputs.of(stream_), input));
    checked(PyDict_SetItem(R.stream.reads.of(stream_), R.buffer.cdata.of(buffer), input));
    R.stream.vids.give(stream_, checked(PyLong_FromLongLong(number(vid) + 1)));
  }

  void add_inputs() const {
    for (const Missing& m : missing_) {
      if (m.buffer != nullptr) {
        add_device_input(m.buffer);
        continue;
      }
      const Below below;  // memory that others write is copied
      const Ref wrapped = checked(THPStorage_Wrap(*m.storage)), offset = checked(PyLong_FromLongLong(m.offset));
      checked(PyObject_CallFunctionObjArgs(R.native_input, stream_, wrapped.get(), m.block, offset.get(), nullptr));
    }
  }

  // Native memory that is written is about to be pending: whoever was to read it gets hold of it before.
  void open_natives() {
    try {
      for (const Write& w : c_.writes) {
        if (found_[w.operand]) continue;
        const Below below;
        found_[w.operand] = checked(PyObject_CallOneArg(R.open_native, python_storage(w.operand).get()));
        opened_.push_back(w.operand);
      }
    } catch (...) {  // an interrupt
      release_opened();
      throw;
    }
  }

  void release_opened() const {
    for (const size_t k : opened_)
      if (!Ref(PyObject_CallOneArg(R.release_buffer, found_[k].get()))) PyErr_Clear();  // on the way to another
  }

  bool is_where_it_was() const {
    return number(R.stream.vids.of(stream_)) == vids_ && R.stream.at.of(stream_) == at_;
  }

  // From here on what the op makes and writes is pending.
  void hand_out() const {
    PyObject* pending = R.stream.pending.of(stream_);
    for (const Fresh& f : fresh_) {
      checked(PyDict_SetItem(memory_.table, f.address.get(), f.buffer.get()));
      checked(PyDict_SetItem(pending, f.address.get(), f.buffer.get()));
    }
    for (const Write& w : c_.writes) {
      PyObject* b = found_[w.operand].get();
      R.buffer.stream.set(b, stream_);
      R.buffer.epoch.set(b, R.stream.epoch.of(stream_));
      R.buffer.vid.set(b, w.vid.get());
      R.buffer.home.set(b, w.home.get());
      if (R.buffer.array.of(b) != Py_None) {
        R.buffer.previous.set(b, R.buffer.array.of(b));
        R.buffer.array.set(b, Py_None);
      }
      R.buffer.error.set(b, Py_None);
      checked(PyDict_SetItem(pending, R.buffer.cdata.of(b), b));
    }
  }

  // `Stream.went`
  void went() const {
    R.step.likely.set(R.stream.at.of(stream_), step_);
    PyObject* ended = R.stream.ended.of(stream_);
    if (ended != Py_None) {
      R.step.then.set(ended, step_);
      R.stream.ended.set(stream_, Py_None);
    }
    R.stream.at.set(stream_, step_);
  }

  std::vector<at::Tensor> returned() const {
    std::vector<at::Tensor> results;
    for (const Returned& r : c_.returned) {
      if (r.kind == Returned::FRESH)
        results.push_back(fresh_[r.index].tensor);
      else
        results.push_back(r.kind == Returned::SAME ? *tensors_[r.index] : at::Tensor());
    }
    return results;
  }

  struct Fresh {
    at::Tensor tensor;
    Ref address, buffer;
  };

  CompiledStep& c_;
  PyObject *step_, *stream_, *at_ = nullptr;
  const Memory& memory_;
  int64_t vids_ = 0;
  c10::SmallVector<const at::Tensor*, 8> tensors_;
  c10::SmallVector<const at::Tensor*, 8> rewritten_;  // of a list: the elements get no new version above us
  c10::SmallVector<IValue, 4> numbers_;
  c10::SmallVector<Ref, 8> found_;  // the operands' buffers: kept, for a finalizer may settle their values
  c10::SmallVector<Missing, 4> missing_;
  std::unordered_map<const c10::StorageImpl*, size_t> places_;  // in `missing_`, of those behind the first few
  std::vector<Fresh> fresh_;
  std::vector<size_t> opened_;  // the operands that were native until now
};

}  // namespace fused_eager
