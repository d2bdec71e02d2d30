// The runtime's own objects that following reads and changes: where their slots are, and what is shared by all.

#pragma once

#include "objects.h"

namespace fused_eager {

struct BufferSlots {
  Slot array, born_native, cdata, epoch, error, home, origin, previous, storage, stream, vacant, vid;
};
struct StreamSlots {
  Slot at, config, ended, epoch, guess, natives, nodes, pace, pending, reads, spell, unfinished, vids, witnessed;
};
struct StepSlots {
  Slot call, compiled, depth, info, likely, node, operands, then, vids;
};
struct NodeSlots {
  Slot place, results, scalars;
};
struct OtherSlots {
  Slot pace_native, pace_waiting, spell_left, read_array, read_vid, native_vid;
};

// Filled once, by `connect`.
struct Runtime {
  BufferSlots buffer;
  StreamSlots stream;
  StepSlots step;
  NodeSlots node;
  OtherSlots other;
  PyTypeObject* front_door = nullptr;
  PyTypeObject* buffer_type = nullptr;
  PyObject* table = nullptr;     // the storages whose value is not in their memory, by address
  PyObject* backlog = nullptr;   // what has been launched
  PyObject* site = nullptr;      // the names of that module
  PyObject *acquire = nullptr, *release = nullptr;  // the runtime's lock
  PyObject *native_input = nullptr, *device_input = nullptr, *with_scalars = nullptr, *view_of = nullptr;
  PyObject *treatment_of = nullptr, *settings_of = nullptr, *is_internal = nullptr;
  int64_t flags_at = 0;          // of the three flags in `StorageImpl` by which a storage is trapped
  void* unwritten = nullptr;     // where the addresses without memory begin
  int64_t unwritten_least = 0, unwritten_most = 0;  // bytes of the tensors that lie over them
  bool open = false;             // whether anything is followed here
};

inline Runtime R;

inline PyObject* name_of(const char* text) { return PyUnicode_InternFromString(text); }

}  // namespace fused_eager
