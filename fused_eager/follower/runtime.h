// What the runtime has handed over (spec.py): where the slots of its objects are, and what is shared by all.

#pragma once

#include "objects.h"

#include <array>

#include "spec.h"

namespace fused_eager {

// Filled once, by `connect`.
struct Runtime : Shared {
  bool open = false;  // whether anything is followed here
};

inline Runtime R;

inline PyObject* name_of(const char* text) { return PyUnicode_InternFromString(text); }

}  // namespace fused_eager
