// What the runtime has handed over (spec.py): where the slots of its objects are, and what is shared by all.

#pragma once

#include "objects.h"

#include <c10/core/Device.h>

#include <array>

#include "spec.h"

namespace fused_eager {

// Filled once, by `connect`.
struct Runtime : Shared {
  bool open = false;  // whether anything is followed here
  Slot of_device, of_table;  // of an accelerator's buffers; found by `serve`
};

inline Runtime R;

// Where the tensors of a stream lie, and their buffers.
struct Memory {
  c10::Device device = c10::kCPU;
  PyObject* table = nullptr;             // the buffers, by the address of their storage
  PyTypeObject* buffer_type = nullptr;
  PyObject* accelerator = nullptr;       // the device as Python has it; null: the host
};

inline PyObject* name_of(const char* text) { return PyUnicode_InternFromString(text); }

}  // namespace fused_eager
