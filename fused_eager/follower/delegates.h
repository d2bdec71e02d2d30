// What torch wants of a device in C++ (its guard, events and generators): each hands on to an object of Python's.

#pragma once

#include "objects.h"

#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <map>
#include <mutex>

namespace fused_eager {

template <class... Given>
Ref asked(PyObject* of, const char* name, Given... given) {
  return checked(PyObject_CallMethodObjArgs(of, Ref(PyUnicode_FromString(name)).get(), given..., nullptr));
}

// Which type of device it is, asked several times around each op and node; and `torch.Event`, which is a
// `frontends.device.queues.Event`. Where Python's guard stands alone it says the former and no more.
class AcceleratorGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  explicit AcceleratorGuard(PyObject* make_event) : make_event_(make_event) {}

  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return c10::Device(c10::kPrivateUse1, 0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, getDevice()); }
  c10::Stream getNewStream(c10::Device of, int) const override { return getStream(of); }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream(getDevice()); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}

  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    const Locked locked;
    if (*event == nullptr) {
      PyObject* timed = flag == c10::EventFlag::BACKEND_DEFAULT ? Py_True : Py_False;
      *event = checked(PyObject_CallOneArg(make_event_, timed)).release();
    }
    asked(python(*event), "record");
  }
  void block(void* event, const c10::Stream&) const override {
    const Locked locked;
    if (event != nullptr) asked(python(event), "wait");
  }
  bool queryEvent(void* event) const override {
    const Locked locked;
    return event == nullptr || is_true(asked(python(event), "query").get());
  }
  void synchronizeEvent(void* event) const override {
    const Locked locked;
    if (event != nullptr) asked(python(event), "synchronize");
  }
  double elapsedTime(void* first, void* last, const c10::DeviceIndex) const override {
    const Locked locked;
    const double found = PyFloat_AsDouble(asked(python(first), "elapsed_time", python(last)).get());
    if (found == -1 && PyErr_Occurred()) raise();
    return found;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event == nullptr || !Py_IsInitialized()) return;
    const Locked locked;
    Py_DECREF(python(event));
  }

 private:
  static PyObject* python(void* event) { return static_cast<PyObject*>(event); }
  PyObject* make_event_;
};

// `torch.Generator` of the device: its state is a `frontends.device.random.Generator`.
class AcceleratorGenerator final : public c10::GeneratorImpl {
 public:
  AcceleratorGenerator(c10::DeviceIndex index, Ref state)
      : GeneratorImpl(c10::Device(c10::kPrivateUse1, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        state_(std::move(state)) {}
  ~AcceleratorGenerator() override {
    if (!Py_IsInitialized()) {
      state_.release();
      return;
    }
    const Locked locked;
    state_ = Ref();
  }

  PyObject* state() const { return state_.get(); }

  void set_current_seed(uint64_t seed) override {
    const Locked locked;
    asked(state(), "reseed", checked(PyLong_FromUnsignedLongLong(seed)).get());
  }
  uint64_t current_seed() const override { return number_of("seed"); }
  uint64_t get_offset() const override { return number_of("offset"); }
  void set_offset(uint64_t offset) override {
    const Locked locked;
    checked(PyObject_SetAttrString(state(), "offset", checked(PyLong_FromUnsignedLongLong(offset)).get()));
  }
  uint64_t seed() override {
    const uint64_t drawn = c10::detail::getNonDeterministicRandom();
    set_current_seed(drawn);
    return current_seed();
  }
  void set_state(const c10::TensorImpl& given) override {
    const Locked locked;
    const at::Tensor t(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(const_cast<c10::TensorImpl*>(&given)));
    checked(PyObject_SetAttrString(state(), "state", checked(THPVariable_Wrap(t)).get()));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const Locked locked;
    return THPVariable_Unpack(attribute(state(), "state").get()).getIntrusivePtr();
  }

 private:
  AcceleratorGenerator* clone_impl() const override {
    const Locked locked;
    return new AcceleratorGenerator(device().index(), asked(state(), "copy"));
  }
  uint64_t number_of(const char* name) const {
    const Locked locked;
    return static_cast<uint64_t>(number(attribute(state(), name).get()));
  }

  Ref state_;
};

// The state of a generator of the device; None for any other.
inline PyObject* state_of(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  const at::Generator generator = THPGenerator_Unwrap(given);
  if (generator.device().type() != c10::kPrivateUse1) Py_RETURN_NONE;
  return Ref::borrowed(static_cast<AcceleratorGenerator*>(generator.unsafeGetGeneratorImpl())->state()).release();
  END_HANDLE_TH_ERRORS
}

// A generator of the device's over a state of Python's, as torch knows it.
inline PyObject* generator_over(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  long index = 0;
  PyObject* state = nullptr;
  if (!PyArg_ParseTuple(given, "lO", &index, &state)) return nullptr;
  return THPGenerator_Wrap(
      at::make_generator<AcceleratorGenerator>(static_cast<c10::DeviceIndex>(index), Ref::borrowed(state)));
  END_HANDLE_TH_ERRORS
}

inline at::Generator new_generator(PyObject* make_generator, c10::DeviceIndex index) {
  const Locked locked;
  index = std::max<c10::DeviceIndex>(index, 0);
  Ref state = checked(PyObject_CallOneArg(make_generator, checked(PyLong_FromLong(index)).get()));
  return at::make_generator<AcceleratorGenerator>(index, std::move(state));
}

// Memory of the host's that a program asked to be pinned. JAX pins none for others, so it is like any other, and a copy
// from it is made as from any other; but torch can tell it (`is_pinned`), and every way to ask for it works.
class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    c10::DataPtr made = c10::GetCPUAllocator()->allocate(size);
    void* at = made.get();
    if (at == nullptr) return made;
    const std::lock_guard<std::mutex> guard(mutex_);
    sizes_[at] = size;
    return {at, new Block{std::move(made)}, &PinnedMemory::free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }

  bool holds(const void* at) const {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto after = sizes_.upper_bound(const_cast<void*>(at));
    if (after == sizes_.begin()) return false;
    const auto& [first, size] = *std::prev(after);
    return static_cast<const char*>(at) < static_cast<const char*>(first) + size;
  }

  static PinnedMemory& get() {  // never destroyed: tensors may be freed after everything else
    static auto& found = *new PinnedMemory;
    return found;
  }

 private:
  struct Block {
    c10::DataPtr memory;
  };

  static void free(void* given) {
    const std::unique_ptr<Block> block(static_cast<Block*>(given));
    PinnedMemory& all = get();
    const std::lock_guard<std::mutex> guard(all.mutex_);
    all.sizes_.erase(block->memory.get());
  }

  mutable std::mutex mutex_;
  std::map<void*, size_t> sizes_;
};

// What torch asks of an accelerator.
struct AcceleratorHooks final : at::PrivateUse1HooksInterface {
  explicit AcceleratorHooks(PyObject* make_generator) : make_generator_(make_generator) {}

  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return new_generator(make_generator_, index); }
  bool isPinnedPtr(const void* at) const override { return PinnedMemory::get().holds(at); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedMemory::get(); }

 private:
  PyObject* make_generator_;  // kept for good, as this is
};

// Once in a process, before anybody else registers hooks.
inline PyObject* register_hooks(PyObject*, PyObject* make_generator) {
  HANDLE_TH_ERRORS
  Py_INCREF(make_generator);
  at::RegisterPrivateUse1HooksInterface(new AcceleratorHooks(make_generator));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Both are kept for good. `make_generator` makes the state of a generator of the device of a number.
inline void register_delegates(PyObject* make_event, PyObject* make_generator) {
  const c10::impl::DeviceGuardImplRegistrar guard(c10::kPrivateUse1, new AcceleratorGuard(make_event));
  const at::_GeneratorRegister generators(
      [make_generator](c10::DeviceIndex index) { return new_generator(make_generator, index); });
}

}  // namespace fused_eager
