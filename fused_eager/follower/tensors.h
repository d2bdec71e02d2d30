// New tensors whose values are to come, as the devices in Python make them.

#pragma once

#include "step.h"

#include <ATen/EmptyTensor.h>

namespace fused_eager {

// A tensor over memory that nobody has written, trapped: see devices/host/trap.py.
inline at::Tensor new_on_host(const Output& o) {
  at::Tensor t;
  if (R.unwritten != 0 && R.unwritten_least <= o.nbytes && o.nbytes <= R.unwritten_most)
    t = at::from_blob(reinterpret_cast<void*>(R.unwritten), o.sizes, o.strides, [](void*) {},
                      at::TensorOptions().dtype(o.dtype));
  else
    t = at::Tensor(at::detail::empty_strided_cpu(o.sizes, o.strides, o.dtype));
  std::memset(reinterpret_cast<char*>(t.storage().unsafeGetStorageImpl()) + R.flags_at, 1, 3);
  return t;
}

constexpr uint64_t FIRST_ADDRESS = uint64_t(1) << 62;  // Python takes its own from far below: devices/accelerator.py
constexpr uint64_t ALIGNED = 64;

// A tensor over addresses that nobody maps, and nobody else has had. The caller has the runtime's lock.
inline at::Tensor new_on_accelerator(const Output& o, c10::Device device) {
  static uint64_t next = FIRST_ADDRESS;
  const uint64_t address = o.nbytes == 0 ? 0 : next;
  next += (static_cast<uint64_t>(o.nbytes) + ALIGNED - 1) / ALIGNED * ALIGNED;
  return at::from_blob(reinterpret_cast<void*>(address), o.sizes, o.strides, [](void*) {},
                       at::TensorOptions().dtype(o.dtype).device(device), device);
}

inline at::Tensor new_tensor(const Output& o, const Memory& memory) {
  return memory.accelerator == nullptr ? new_on_host(o) : new_on_accelerator(o, memory.device);
}

}  // namespace fused_eager
